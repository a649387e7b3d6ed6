"""Who may publish and subscribe to what: the ACL file, read from the top, where the first line that fits decides.

    # whom the lines below are about: user NAME, authenticated (any checked name), or anyone
    authenticated
    allow all        vehicles/%u/#
    user dashboard
    deny  subscribe  vehicles/+/private
    allow subscribe  vehicles/+/+

What no line allows is denied; with no file, everything is allowed. A subscription is allowed where one line
allows all of it and no line before that denies any of it: what a subscriber may not read cannot reach it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from holdfast.auth.bounded import Recent
from holdfast.auth.files import Watched, decode, meaningful_lines
from holdfast.auth.filters import Levels, covers, levels, overlaps
from holdfast.auth.identity import Identity
from holdfast.errors import RequestError
from holdfast.topics import TOPIC_BYTES_MAX, check_filter

IDENTITIES_MAX = 16_384
TOPICS_MAX = 512
TOPIC_LENGTH_MAX = 200
"""What one connection may have remembered: about 100 KB, however hostile its topics."""

SHARED = ("$share", "$shared", "$shares", "$queue")

_TAKES = "a line is `allow|deny publish|subscribe|all FILTER`, `user NAME`, `authenticated`, `anyone`, or a # comment"
_RULE = re.compile(r"(allow|deny)\s+(publish|subscribe|all)\s+(\S.*)")
_NAME_IN_FILTER = re.compile(r"%(.?)")

Rules: TypeAlias = tuple[tuple[bool, Levels | None], ...]
"""Allow or deny, and for which topics; None stands for every topic, those with `$` included."""


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    allow: bool
    action: str
    filter: str
    levels: Levels | None
    """None where there is a name to fill in first."""


@dataclass(frozen=True, slots=True)
class _Lines:
    anyone: list[_Line] = field(default_factory=list)
    authenticated: list[_Line] = field(default_factory=list)
    by_user: dict[str, list[_Line]] = field(default_factory=dict)

    def about(self, user: str | None) -> list[_Line]:
        if user is None:
            return self.anyone
        found = [*self.anyone, *self.authenticated, *self.by_user.get(user, ())]
        return sorted(found, key=lambda line: line.number)


@dataclass(frozen=True, slots=True)
class _Rights:
    publish: Rules
    subscribe: Rules


class Acl:
    """The rules in force. `refresh` now and then; nothing else here looks at the disk."""

    def __init__(self, path: Path | None, identities_max: int = IDENTITIES_MAX):
        self.file = None if path is None else Watched("ACL file", path, _parse)
        self._rights: Recent[tuple[int, str | None, str], _Rights] = Recent(identities_max)

    @property
    def generation(self) -> int:
        """Goes up when the rules change: time to check subscriptions again."""
        return 0 if self.file is None else self.file.generation

    def refresh(self) -> bool:
        """Read the file if it has changed. True when there are new rules."""
        return self.file is not None and self.file.refresh()

    def may_publish(self, identity: Identity, topic: str) -> bool:
        if self.file is None:
            return True
        wanted = levels(topic)
        for allow, about in self._rights_of(self.file, identity).publish:
            if about is None or covers(about, wanted):
                return allow
        return False

    def may_subscribe(self, identity: Identity, filter_text: str) -> bool:
        """May all that the filter matches be read? The filter is without `$share/GROUP/`; with it, never."""
        if self.file is None:
            return True
        wanted = levels(filter_text)
        for allow, about in self._rights_of(self.file, identity).subscribe:
            if allow and about is not None and covers(about, wanted):
                return True
            if not allow and (about is None or overlaps(about, wanted)):
                return False
        return False

    def publish_checker(self, identity: Identity) -> Callable[[str], bool]:
        """`may_publish` for one connection: it remembers answers until the rules change."""
        file = self.file
        if file is None:
            return _always
        known: dict[str, bool] = {}
        generation = file.generation

        def may_publish(topic: str) -> bool:
            nonlocal generation
            if generation != file.generation:
                known.clear()
                generation = file.generation
            answer = known.get(topic)
            if answer is None:
                answer = self.may_publish(identity, topic)
                if len(topic) <= TOPIC_LENGTH_MAX:
                    if len(known) >= TOPICS_MAX:
                        known.clear()
                    known[topic] = answer
            return answer

        return may_publish

    def _rights_of(self, file: Watched[_Lines], identity: Identity) -> _Rights:
        key = (file.generation, identity.user, identity.client_id)
        rights = self._rights.get(key)
        if rights is None:
            lines = file.value.about(identity.user)
            rights = _Rights(_rules(lines, "publish", identity), _rules(lines, "subscribe", identity))
            self._rights.put(key, rights)
        return rights


def _always(topic: str) -> bool:
    return True


def _rules(lines: list[_Line], action: str, identity: Identity) -> Rules:
    found: list[tuple[bool, Levels | None]] = []
    for line in lines:
        if line.action not in (action, "all"):
            continue
        about = line.levels or _filled_in(line.filter, identity)
        # With a name that cannot be filled in, the line cannot say what it means. An allow then allows nothing;
        # a deny must not turn into permission, so it denies everything.
        if about is not None or not line.allow:
            found.append((line.allow, about))
    return tuple(found)


def _filled_in(template: str, identity: Identity) -> Levels | None:
    names = {"c": identity.client_id, "u": identity.user or "", "%": "%"}
    if not all(_can_be_filled_in(names[use]) for use in _NAME_IN_FILTER.findall(template)):
        return None
    # In one pass: a client that calls itself `%u` gets no further than its own name.
    text = _NAME_IN_FILTER.sub(lambda found: names[found[1]], template)
    return levels(text) if len(text.encode(errors="replace")) <= TOPIC_BYTES_MAX else None


def _can_be_filled_in(name: str) -> bool:
    # '+', '#' and '/' would make it another filter than was written; a leading '$' would reach the broker's own topics.
    return bool(name) and not name.startswith("$") and not any(c in name for c in "+#/\0")


def _parse(name: str, content: bytes) -> _Lines:
    found = _Lines()
    block: list[_Line] | None = None
    for number, line in meaningful_lines(decode(name, content)):
        where = f"{name}, line {number}"
        words = line.split(None, 1)
        match words:
            case ["anyone"]:
                block = found.anyone
            case ["authenticated"]:
                block = found.authenticated
            case ["user", user]:
                block = found.by_user.setdefault(user, [])
            case _:
                rule = _RULE.fullmatch(line)
                if rule is None:
                    raise RequestError(f"{where}: got {line!r}; {_TAKES}")
                if block is None:
                    raise RequestError(
                        f"{where}: got {line!r}, but not yet whom it is about; "
                        f"begin with `user NAME`, `authenticated` or `anyone`"
                    )
                block.append(_line(where, number, *rule.groups()))
    return found


def _line(where: str, number: int, verdict: str, action: str, filter_text: str) -> _Line:
    uses = _NAME_IN_FILTER.findall(filter_text)
    for use in uses:
        if use not in ("c", "u", "%"):
            raise RequestError(
                f"{where}: got '%{use}' in {filter_text!r}; "
                f"a filter takes %c (client id), %u (user name) and %% (a '%' itself)"
            )
    try:
        check_filter(_NAME_IN_FILTER.sub("x", filter_text))
    except RequestError as error:
        raise RequestError(f"{where}: got {filter_text!r}; {error}") from error
    if filter_text.split("/")[0] in SHARED:
        raise RequestError(
            f"{where}: got {filter_text!r}; leave out the part before the filter proper: "
            f"whoever may subscribe to a filter may also share it"
        )
    return _Line(number, verdict == "allow", action, filter_text, None if uses else levels(filter_text))
