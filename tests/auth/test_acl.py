"""The ACL file: the first line that fits decides, and a subscription never reads more than its lines allow."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from filter_strategies import TOPICS, filters
from hypothesis import given
from hypothesis import strategies as st

from holdfast.auth import Acl, Identity
from holdfast.auth.acl import TOPIC_LENGTH_MAX, TOPICS_MAX, _parse, _rules
from holdfast.errors import RequestError
from holdfast.topics import match

ALICE = Identity(user="alice", client_id="truck-1")
NOBODY = Identity(user=None, client_id="truck-2")


def acl(folder: Path, text: str) -> Acl:
    path = folder / "acl"
    path.write_text(text)
    return Acl(path)


def rewrite(path: Path, text: str) -> None:
    """As an editor does it: another file in the old one's place."""
    beside = path.with_name("new")
    beside.write_text(text)
    os.replace(beside, path)


def test_without_a_file_everything_is_allowed() -> None:
    open_to_all = Acl(None)
    assert open_to_all.may_publish(NOBODY, "a") and open_to_all.may_subscribe(NOBODY, "#")
    assert open_to_all.publish_checker(NOBODY)("a")
    assert not open_to_all.refresh() and open_to_all.generation == 0


def test_an_empty_file_allows_nothing(tmp_path: Path) -> None:
    closed = acl(tmp_path, "# nothing\n\n")
    assert not closed.may_publish(ALICE, "a") and not closed.may_subscribe(ALICE, "a")


def test_blocks_are_about_whom_they_say(tmp_path: Path) -> None:
    rules = acl(
        tmp_path,
        "anyone\nallow publish open\nauthenticated\nallow publish members\nuser alice\nallow publish hers\n"
        "user Bob B.\nallow publish his\n",
    )
    assert [rules.may_publish(NOBODY, t) for t in ("open", "members", "hers")] == [True, False, False]
    assert [rules.may_publish(ALICE, t) for t in ("open", "members", "hers", "his")] == [True, True, True, False]
    assert rules.may_publish(Identity(user="Bob B."), "his")
    assert not rules.may_publish(Identity(user="", client_id="x"), "hers")


def test_actions_are_apart(tmp_path: Path) -> None:
    rules = acl(tmp_path, "anyone\nallow publish p\nallow subscribe s\nallow all both/of them\n")
    assert rules.may_publish(ALICE, "p") and not rules.may_subscribe(ALICE, "p")
    assert rules.may_subscribe(ALICE, "s") and not rules.may_publish(ALICE, "s")
    assert rules.may_publish(ALICE, "both/of them") and rules.may_subscribe(ALICE, "both/of them")


def test_the_first_line_that_fits_decides_across_blocks(tmp_path: Path) -> None:
    rules = acl(tmp_path, "user alice\nallow publish a/b\nanyone\ndeny publish a/#\nuser alice\nallow publish #\n")
    assert rules.may_publish(ALICE, "a/b") and rules.may_publish(ALICE, "c")
    assert not rules.may_publish(ALICE, "a/c") and not rules.may_publish(NOBODY, "a/b")


def test_a_subscription_must_be_allowed_whole(tmp_path: Path) -> None:
    rules = acl(tmp_path, "anyone\nallow subscribe a/b\ndeny subscribe a/#\nallow subscribe +/+\n")
    assert rules.may_subscribe(ALICE, "a/b") and rules.may_subscribe(ALICE, "c/+")
    assert not rules.may_subscribe(ALICE, "+/b")  # part of it is denied
    assert not rules.may_subscribe(ALICE, "c/#")  # only part of it is allowed


def test_wildcards_do_not_open_topics_of_the_broker_nor_shared_filters(tmp_path: Path) -> None:
    rules = acl(tmp_path, "anyone\nallow all #\n")
    assert rules.may_subscribe(ALICE, "#")
    assert not rules.may_subscribe(ALICE, "$SYS/#") and not rules.may_publish(ALICE, "$SYS/x")
    assert not rules.may_subscribe(ALICE, "$share/group/a")


def test_names_are_filled_in(tmp_path: Path) -> None:
    rules = acl(tmp_path, "authenticated\nallow all u/%u/#\nallow all c/%c/100%%\nallow all x-%u-%c\n")
    assert rules.may_publish(ALICE, "u/alice/x") and rules.may_subscribe(ALICE, "u/alice/#")
    assert rules.may_publish(ALICE, "c/truck-1/100%") and rules.may_publish(ALICE, "x-alice-truck-1")
    assert not rules.may_publish(ALICE, "u/bob/x") and not rules.may_publish(ALICE, "c/truck-2/100%")


@pytest.mark.parametrize("name", ["+", "#", "a/b", "a+", "$SYS", "", "a\0b", "x" * 65_535])
@pytest.mark.parametrize("which", ["u", "c"])
def test_a_name_that_is_no_level_is_not_filled_in(tmp_path: Path, which: str, name: str) -> None:
    who = Identity(user=name, client_id="c") if which == "u" else Identity(user="u", client_id=name)
    rules = acl(tmp_path, f"anyone\nallow all %{which}/private\nallow all open\ndeny all %{which}/x\nallow all #\n")
    for topic in (f"{name}/private", "a/private", "b/private", "a/b/private", "$SYS/private", "/private"):
        assert not rules.may_publish(who, topic) and not rules.may_subscribe(who, topic)
    # The deny line cannot say what it denies, so it denies all: it must not turn into permission.
    assert rules.may_publish(who, "open") and rules.may_subscribe(who, "open")
    assert not rules.may_publish(who, "else") and not rules.may_subscribe(who, "else")


def test_an_anonymous_client_has_no_name_to_fill_in(tmp_path: Path) -> None:
    assert not acl(tmp_path, "anyone\nallow all u/%u/#\n").may_publish(NOBODY, "u//x")


def test_a_client_that_calls_itself_a_placeholder_stays_itself(tmp_path: Path) -> None:
    rules = acl(tmp_path, "anyone\nallow publish c/%c\n")
    sly = Identity(user="alice", client_id="%u")
    assert rules.may_publish(sly, "c/%u") and not rules.may_publish(sly, "c/alice")


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("anyone\nallow publish\n", 2, "'allow publish'; a line is `allow|deny publish|subscribe|all FILTER`"),
        ("permit publish a\n", 1, "'permit publish a'; a line is"),
        ("anyone\nallow read a\n", 2, "'allow read a'; a line is"),
        ("user\n", 1, "'user'; a line is"),
        ("anyone else\n", 1, "'anyone else'; a line is"),
        ("# who?\n\nallow publish a\n", 3, "not yet whom it is about"),
        ("anyone\nallow publish a/#/b\n", 2, "'#' stands alone"),
        ("anyone\nallow publish %c+\n", 2, "'\\+' takes a whole level"),
        ("anyone\nallow publish a/%x\n", 2, "'%x'.*takes %c"),
        ("anyone\nallow publish a%\n", 2, "'%'.*takes %c"),
        ("anyone\nallow subscribe $share/g/a\n", 2, "leave out"),
        ("anyone\nallow subscribe $queue/a\n", 2, "leave out"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, line: int, says: str) -> None:
    says = says.replace("|", r"\|") if "FILTER" in says else says
    with pytest.raises(RequestError, match=rf"ACL file .*acl, line {line}: got .*{says}"):
        acl(tmp_path, text)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"ACL file .*gone cannot be read: No such file"):
        Acl(tmp_path / "gone")
    (tmp_path / "latin").write_bytes(b"anyone\n\nallow publish \xe9\n")
    with pytest.raises(RequestError, match=r"ACL file .*latin, line 3: not UTF-8"):
        Acl(tmp_path / "latin")


def test_changed_rules_reach_connections_that_are_open(tmp_path: Path) -> None:
    rules = acl(tmp_path, "anyone\nallow publish a\n")
    may = rules.publish_checker(ALICE)
    assert may("a") and may("a") and not may("b")
    assert not rules.refresh()
    rewrite(tmp_path / "acl", "anyone\nallow publish b\n")
    assert may("a"), "nothing looks at the disk but refresh"
    assert rules.refresh() and rules.generation == 1
    assert not may("a") and may("b")


def test_a_file_that_goes_bad_leaves_the_last_good_rules(tmp_path: Path) -> None:
    rules = acl(tmp_path, "anyone\nallow publish a\n")
    assert rules.file is not None
    rewrite(tmp_path / "acl", "anyone\nallow pubish a\n")
    assert not rules.refresh() and not rules.refresh()
    assert rules.may_publish(ALICE, "a")
    assert "line 2: got 'allow pubish a'" in str(rules.file.problem) and "last good" in str(rules.file.problem)
    os.rename(tmp_path / "acl", tmp_path / "away")
    assert not rules.refresh() and "cannot be read" in str(rules.file.problem)
    os.rename(tmp_path / "away", tmp_path / "acl")
    assert not rules.refresh() and "line 2" in str(rules.file.problem)
    rewrite(tmp_path / "acl", "anyone\nallow publish b\n")
    assert rules.refresh() and rules.file.problem is None and rules.may_publish(ALICE, "b")


def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "acl"
    path.write_text("authenticated\nallow publish u/%u/#\n")
    rules = Acl(path, identities_max=3)
    for i in range(10):
        assert rules.may_publish(Identity(user=f"u{i}"), f"u/u{i}/x")
    assert len(rules._rights) == 3
    may = rules.publish_checker(ALICE)
    assert all(may(f"u/alice/{i}") for i in range(TOPICS_MAX * 2 + 1))
    assert may("u/alice/" + "x" * TOPIC_LENGTH_MAX) and not may("x" * (TOPIC_LENGTH_MAX + 1))
    closure = may.__closure__ or ()
    (known,) = [cell.cell_contents for cell in closure if isinstance(cell.cell_contents, dict)]
    assert len(known) <= TOPICS_MAX and max(map(len, known)) <= TOPIC_LENGTH_MAX


lines = st.lists(
    st.tuples(st.sampled_from(["allow", "deny"]), st.sampled_from(["publish", "subscribe", "all"]), filters), max_size=5
)


@given(lines, filters)
def test_nothing_that_a_subscription_matches_is_denied(rules: list[tuple[str, str, str]], wanted: str) -> None:
    text = "anyone\n" + "".join(f"{verdict} {action} {filter_text}\n" for verdict, action, filter_text in rules)
    checked = _InMemory(text)

    def by_hand(topic: str) -> bool:
        for verdict, action, filter_text in rules:
            if action in ("subscribe", "all") and match(filter_text, topic):
                return verdict == "allow"
        return False

    if checked.may_subscribe(ALICE, wanted):
        assert all(by_hand(topic) for topic in TOPICS if match(wanted, topic))
    for topic in TOPICS[::7]:
        assert checked.may_subscribe(ALICE, topic) == by_hand(topic)
        assert checked.publish_checker(ALICE)(topic) == checked.may_publish(ALICE, topic)


class _InMemory(Acl):
    """The same rules, from text: a file for each of hypothesis' examples would be slow."""

    def __init__(self, text: str):
        super().__init__(Path(os.devnull))
        assert self.file is not None
        self.file.value = _parse("text", text.encode())


def test_rules_are_worked_out_once_for_each_identity(tmp_path: Path) -> None:
    rules = acl(tmp_path, "authenticated\nallow publish a\n")
    rules.may_publish(ALICE, "a")
    assert rules.file is not None
    first = rules._rights_of(rules.file, ALICE)
    assert rules._rights_of(rules.file, Identity(user="alice", client_id="truck-1")) is first
    assert first.publish == _rules(rules.file.value.about("alice"), "publish", ALICE)


def test_the_example_in_the_documents_does_what_is_said_of_it(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    (example,) = re.findall(r"^```acl\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rules = acl(tmp_path, example)
    dashboard = Identity(user="dashboard", client_id="d")
    assert rules.may_subscribe(dashboard, "vehicles/+/position")
    assert not rules.may_subscribe(dashboard, "vehicles/+/+") and not rules.may_subscribe(
        dashboard, "vehicles/1/private"
    )
    assert rules.may_publish(ALICE, "vehicles/alice/position") and not rules.may_publish(ALICE, "vehicles/bob/position")
    assert rules.may_publish(NOBODY, "hello") and not rules.may_publish(NOBODY, "vehicles/x")
