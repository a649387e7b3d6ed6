# Two commands do everything: `make demo` and `make test`. They need Python 3.11+ (with venv) and make.
PYTHON ?= python3.11
ifeq (,$(shell command -v $(PYTHON) 2>/dev/null))
PYTHON := python3
endif
BIN := .venv/bin

.PHONY: setup demo fast test check bench soak clean
setup: .venv/.ready

.venv/.ready: requirements.txt requirements-spark.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Holdfast needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + " (say which with make PYTHON=...)")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.txt --requirement requirements-spark.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup
	$(BIN)/holdfast demo

# The daily loop: units, contracts on memory, a slice of the simulator. No servers, no sockets, no Spark.
FAST := tests/test_architecture.py tests/test_settings.py tests/test_topics.py tests/auth tests/batch tests/contract tests/cursors tests/delivery \
        tests/fanout tests/groups tests/log tests/mqtt tests/runtime tests/sessions tests/sim
fast: setup
	$(BIN)/python -m pytest -n 4 -m "not soak" -k "not (postgres or etcd or sqlite or mutation or paho or every_legal_move)" $(FAST)

test: setup
	$(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile --no-loadscope-reorder

check: setup
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m bench

soak: setup
	$(BIN)/python -m pytest -m soak

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis
