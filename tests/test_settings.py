"""Settings: who overrides whom, what is refused and how, and that every one of them is documented.

`python tests/test_settings.py` writes docs/settings.md anew.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from holdfast import settings
from holdfast.errors import RequestError
from holdfast.settings import CHOICES, Settings, address, load

DOCUMENT = Path(__file__).parent.parent / "docs" / "settings.md"

INTRODUCTION = """\
# Settings

Every setting has a default. A value in the settings file (`holdfast serve --config holdfast.toml`) overrides it, an
environment variable overrides the file, and a flag (`--set section.key=value`) overrides the environment. A
variable is the setting's name in capitals, with `HOLDFAST_` in front and `_` for the dot:
`cursors.subscription_progress_flush_secs` is `HOLDFAST_CURSORS_SUBSCRIPTION_PROGRESS_FLUSH_SECS`.

```toml
node_id = "node-1"

[mqtt]
listen = "127.0.0.1:1883"

[cursors]
subscription_progress_flush_secs = 5
```

A value that cannot be right ends the start, with the key, what it got and what it takes.
"""


# -- file < environment < flag ---------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "holdfast.toml"
    path.write_text('node_id = "from-file"\n[log]\nshards = 4\nshard_by = "topic"\n[groups]\nenabled = false\n')
    return path


def test_defaults():
    assert load() == Settings()
    assert load().log.shards == 16 and load().cursors.subscription_progress_flush_secs == 5
    assert load().mqtt.listen == "127.0.0.1:1883" and load().http.listen == "127.0.0.1:8083"
    assert load().store_url == "sqlite:///holdfast-data/holdfast.db"
    assert load(flags=["store=memory:"]).store_url == "memory:"


def test_the_file_overrides_the_defaults(file):
    found = load(file)
    assert (found.node_id, found.log.shards, found.log.shard_by) == ("from-file", 4, "topic")
    assert found.groups.enabled is False and found.mqtt == Settings().mqtt


def test_the_environment_overrides_the_file(file):
    found = load(file, {"HOLDFAST_LOG_SHARDS": "8", "HOLDFAST_NODE_ID": "from-environment", "PATH": "/"})
    assert (found.node_id, found.log.shards, found.log.shard_by) == ("from-environment", 8, "topic")


def test_a_flag_overrides_everything_and_the_last_one_wins(file):
    environment = {"HOLDFAST_LOG_SHARDS": "8"}
    assert load(file, environment, ["log.shards=2", "log.shards = 3"]).log.shards == 3


def test_a_flags_value_may_hold_equals_signs():
    assert load(flags=["store=postgresql://h/db?options=a=b"]).store == "postgresql://h/db?options=a=b"


def test_variables_that_are_no_settings_are_somebody_elses():
    assert load(None, {"HOLDFAST_NO_SKIPS": "1", "HOLDFAST": "x"}) == Settings()


@pytest.mark.parametrize(
    ("text", "meant"), [("true", True), ("Yes", True), ("on", True), ("1", True), ("FALSE", False), ("no", False)]
)
def test_words_for_yes_and_no(text, meant):
    assert load(flags=[f"groups.enabled={text}"]).groups.enabled is meant


# -- bad values name the key, the value and what it takes ------------------------------------------------

BAD = [
    ("log.shards", "many", "a whole number from 1 to 4096"),
    ("log.shards", "0", "a whole number from 1 to 4096"),
    ("log.shards", "4097", "a whole number from 1 to 4096"),
    ("log.shards", "2.5", "a whole number from 1 to 4096"),
    ("mqtt.receive_maximum", "-1", "a whole number, not negative"),
    ("mqtt.receive_maximum", "", "a whole number, not negative"),
    ("cursors.subscription_progress_flush_secs", "soon", "a number, not negative"),
    ("cursors.subscription_progress_flush_secs", "-0.5", "a number, not negative"),
    ("cursors.subscription_progress_flush_secs", "nan", "a number, not negative"),
    ("cursors.subscription_progress_flush_secs", "inf", "a number, not negative"),
    ("groups.enabled", "maybe", "true or false"),
    ("log.shard_by", "vin", "publisher | topic"),
    ("sessions.on_trimmed", "ignore", "error | earliest | latest"),
    ("auth.allow_anonymous", "sometimes", "loopback | never | always"),
    ("auth.jwt_algorithm", "none", "(empty) | HS256 | RS256 | ES256"),
    ("log_level", "loud", "debug | info | warning | error"),
]


@pytest.mark.parametrize(("key", "value", "takes"), BAD)
@pytest.mark.parametrize("source", ["flag", "environment"])
def test_a_bad_value_says_which_key_what_it_got_and_what_it_takes(key, value, takes, source):
    with pytest.raises(RequestError) as caught:
        if source == "flag":
            load(flags=[f"{key}={value}"])
        else:
            load(None, {f"HOLDFAST_{key.replace('.', '_').upper()}": value})
    assert str(caught.value) == f"setting {key} got {value!r}; it takes {takes}"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[log]\nshards = true", "setting log.shards got True; it takes a whole number from 1 to 4096"),
        ("[log]\nshards = 2.5", "setting log.shards got 2.5; it takes a whole number from 1 to 4096"),
        ("[log]\nshards = [1]", "setting log.shards got [1]; it takes a whole number from 1 to 4096"),
        ("[log]\nkeep_secs = 1979-05-27", "it takes a number, not negative"),
        ("[limits]\nconnect_secs = nan", "setting limits.connect_secs got nan; it takes a number, not negative"),
        ("[mqtt]\nlisten = ['a', 'b']", "setting mqtt.listen got ['a', 'b']; it takes text"),
        ("node_id = 5", "setting node_id got 5; it takes text"),
        ("[groups]\nenabled = 'perhaps'", "setting groups.enabled got 'perhaps'; it takes true or false"),
        ("[log]\nshard = 4", "there is no setting 'log.shard'; docs/settings.md lists them"),
        ("[lgo]\nshards = 4", "there is no setting 'lgo.shards'"),
        ("log = 4", "there is no setting 'log'"),
        ("[log.deeper]\nshards = 4", "there is no setting 'log.deeper'"),
        ("[log\nshards = 4", "is not TOML"),
    ],
)
def test_a_bad_file_says_the_same(tmp_path, toml, message):
    path = tmp_path / "holdfast.toml"
    path.write_text(toml)
    with pytest.raises(RequestError) as caught:
        load(path)
    assert message in str(caught.value)


def test_a_missing_file_and_a_flag_without_a_value(tmp_path):
    with pytest.raises(RequestError, match=r"cannot read settings from .*absent.toml: No such file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(RequestError, match=r"--set 'log.shards' has no value; write section.key=value"):
        load(flags=["log.shards"])
    with pytest.raises(RequestError, match=r"there is no setting 'shards'"):
        load(flags=["shards=4"])


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("127.0.0.1:1883", ("127.0.0.1", 1883)),
        ("[::1]:0", ("::1", 0)),
        (":1883", ("0.0.0.0", 1883)),
        ("localhost:65535", ("localhost", 65_535)),
    ],
)
def test_addresses(text, meant):
    assert address("mqtt.listen", text) == meant


@pytest.mark.parametrize("text", ["1883", "localhost", "localhost:", "localhost:mqtt", "localhost:65536", "h:-1"])
def test_a_bad_address_says_the_same(text):
    with pytest.raises(RequestError) as caught:
        address("mqtt.listen", text)
    assert str(caught.value).startswith(f"setting mqtt.listen got {text!r}; it takes HOST:PORT")


# -- documents -------------------------------------------------------------------------------------------


def described() -> dict[str, dict[str, str]]:
    """The text under each field, by class."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(settings)).body:
        if isinstance(node, ast.ClassDef):
            fields = found.setdefault(node.name, {})
            for field, below in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    fields[ast.unparse(field.target)] = ast.literal_eval(below.value)
    return found


def rows(chosen: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """Name, default and meaning of every setting."""
    texts, found = described()[type(chosen).__name__], []
    for entry in dataclasses.fields(chosen):
        value, name = getattr(chosen, entry.name), prefix + entry.name
        if dataclasses.is_dataclass(value):
            found += rows(value, f"{name}.")
        else:
            found.append((name, _shown(value), " ".join(texts.get(entry.name, "").split())))
    return found


def _shown(value: Any) -> str:
    if value == "":
        return "(empty)"
    return f"`{str(value).lower() if isinstance(value, bool) else f'{value:g}' if isinstance(value, float) else value}`"


def document() -> str:
    lines = [INTRODUCTION]
    section = None
    for name, default, meaning in rows(Settings()):
        here = name.rpartition(".")[0]
        if here != section:
            lines.append(f"\n## {here or 'The node'}\n\n| setting | default | meaning |\n|---|---|---|\n")
            section = here
        meaning = meaning.replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | {meaning} |\n")
    return "".join(lines)


def test_every_setting_says_what_it_means():
    assert [name for name, _, meaning in rows(Settings()) if not meaning.endswith(".")] == []


def test_every_choice_belongs_to_a_setting_and_its_default_is_one_of_them():
    values = {name: default.strip("`").replace("(empty)", "") for name, default, _ in rows(Settings())}
    for name, choices in CHOICES.items():
        assert values[name] in choices


def test_the_document_is_in_step():
    assert DOCUMENT.read_text() == document(), "write it anew: python tests/test_settings.py"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
