"""Requests for fan-out on their way into the store: gathered, added in one transaction, answered, then merged.

    $fanout/request        a request, as JSON; its PUBACK means that it is durable
    $fanout/data/{sha1}    a payload, to be referred to by later requests
    $fanout/events/…       what happens to campaigns, for whoever subscribes: `fanout_events.py`

While one transaction is under way the next one fills up. What was added is merged in steps, with a rest after each, and
whoever has something new is triggered.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from holdfast.auth.identity import Identity
from holdfast.errors import HoldfastError, RequestError, StoreError
from holdfast.fanout import requests
from holdfast.fanout.merge import RUN_IDS_MAX, steps
from holdfast.fanout.nouns import Hint, State
from holdfast.fanout.requests import Checked
from holdfast.fanout.table import Added, MergeStep
from holdfast.groups.protocol.nouns import Key
from holdfast.model import Start
from holdfast.mqtt.reasons import Reason
from holdfast.runtime.control_topics import Answer, ControlClient
from holdfast.runtime.fanout import FanoutHost
from holdfast.runtime.fanout_events import EVENTS, FanoutEvents

logger = logging.getLogger("holdfast.fanout")

PREFIX = "$fanout/"
REQUEST, DATA = "$fanout/request", "$fanout/data/"
ADDED_AT_ONCE = 50
WAITING_MAX = 10_000
"""More requests than this do not wait for the store."""
REST_SHARE = 1.0
"""After a step of a merge, as long as it took: publishers wait for the same writer."""
SWITCHED_OFF = "fan-out is switched off on this node (fanout.enabled)"
AGAIN_SECS = 1.0
"""After the store has failed."""
REFUSALS_KEPT = 1_000
REFUSAL_SECS_FIRST, REFUSAL_SECS_MAX = 0.1, 30.0


class _Waiting(NamedTuple):
    checked: Checked
    answer: asyncio.Future[Added]


class FanoutIntake:
    """One per node; the handler of the control topics under `PREFIX`."""

    def __init__(
        self,
        host: FanoutHost,
        may_publish: Callable[[Identity, str], bool],
        tell_others: Callable[[Hint], None],
        events: FanoutEvents,
        enabled: bool,
    ):
        self._events = events
        self._host, self._may_publish, self._tell_others, self._enabled = host, may_publish, tell_others, enabled
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Waiting] = []
        self._adding = False
        self._unmerged = asyncio.Event()
        self._refusals: OrderedDict[str, tuple[bytes, int]] = OrderedDict()
        """Clients that were refused lately: what they had sent, and how often."""

    # -- control topics --------------------------------------------------------------------------------------

    def publish(self, client: ControlClient, topic: str, payload: bytes, retain: bool, answer: Answer) -> None:
        if client.identity is None or not self._may_publish(client.identity, topic):
            answer(Reason.NOT_AUTHORIZED, "")
        elif not self._enabled:
            answer(Reason.IMPLEMENTATION_SPECIFIC_ERROR, SWITCHED_OFF, end=True)
        elif retain:
            answer(Reason.IMPLEMENTATION_SPECIFIC_ERROR, f"{topic} is not a topic that keeps anything", end=True)
        elif topic == REQUEST:
            self._loop.create_task(self._on_request(client, payload, answer))
        elif topic.startswith(DATA):
            self._loop.create_task(self._on_data(client, topic.removeprefix(DATA), payload, answer))
        else:
            answer(Reason.TOPIC_NAME_INVALID, f"expected {REQUEST} or {DATA}SHA1, got {topic[:100]!r}", end=True)

    async def _on_request(self, client: ControlClient, payload: bytes, answer: Answer) -> None:
        try:
            await self.add(requests.parse(payload, self._host.now))
        except RequestError as error:
            await self._refuse(client, payload, error, answer)
        except HoldfastError as error:
            logger.error("a fan-out request of %s was not stored: %s", client.client_id, error)
            answer(Reason.UNSPECIFIED_ERROR, str(error), end=True)
        else:
            self._refusals.pop(client.client_id, None)
            answer(Reason.SUCCESS, "")

    async def _on_data(self, client: ControlClient, name: str, payload: bytes, answer: Answer) -> None:
        try:
            await self.put_payload(payload, name)
        except RequestError as error:
            await self._refuse(client, payload, error, answer)
        except HoldfastError as error:
            answer(Reason.UNSPECIFIED_ERROR, str(error), end=True)
        else:
            answer(Reason.SUCCESS, "")

    async def _refuse(self, client: ControlClient, payload: bytes, error: RequestError, answer: Answer) -> None:
        """A client that sends the same again and again, as MQTT 3 has it, waits longer for each answer."""
        digest = hashlib.sha1(payload, usedforsecurity=False).digest()
        before, count = self._refusals.pop(client.client_id, (b"", 0))
        count = count + 1 if before == digest else 1
        self._refusals[client.client_id] = digest, count
        while len(self._refusals) > REFUSALS_KEPT:
            self._refusals.popitem(last=False)
        if count > 1:
            await asyncio.sleep(min(REFUSAL_SECS_FIRST * 2 ** min(count - 2, 20), REFUSAL_SECS_MAX))
        logger.info("%s: fan-out request refused: %s", client.client_id, error)
        answer(Reason.PAYLOAD_FORMAT_INVALID, str(error), end=True)

    def subscribe(self, client: ControlClient, topic: str, start: Start | None, key: Key | None) -> int:
        return Reason.NOT_AUTHORIZED

    def unsubscribe(self, client: ControlClient, topic: str) -> bool:
        return False

    def is_read(self, topic_filter: str) -> bool:
        return topic_filter.startswith(EVENTS)

    def gone(self, client: ControlClient) -> None: ...

    # -- adding ----------------------------------------------------------------------------------------------

    def check_enabled(self) -> None:
        if not self._enabled:
            raise RequestError(SWITCHED_OFF)

    async def put_payload(self, data: bytes, name: str) -> bytes:
        """`name`: the SHA-1 that its sender believes it has."""
        self.check_enabled()
        sha1 = requests.check_data(data)
        if requests.parse_sha1(name) != sha1:
            raise RequestError(f"the payload's SHA-1 is {sha1.hex()}, not {name}")
        return await self._host.change(self._host.table.put_payload, data)

    async def add(self, checked: Checked) -> Added:
        """A request is durable when this returns. RequestError: it is refused, and nothing of it is stored."""
        self.check_enabled()
        if len(self._waiting) >= WAITING_MAX:
            raise HoldfastError("too many fan-out requests wait for the store")
        answer: asyncio.Future[Added] = self._loop.create_future()
        self._waiting.append(_Waiting(checked, answer))
        if not self._adding:
            self._adding = True
            self._loop.create_task(self._add_all())
        return await answer

    async def _add_all(self) -> None:
        try:
            while self._waiting:
                some, self._waiting = self._waiting[:ADDED_AT_ONCE], self._waiting[ADDED_AT_ONCE:]
                try:
                    answers = await self._host.change(self._store, [one.checked for one in some])
                except Exception as error:
                    for one in some:
                        one.answer.set_exception(error)
                    continue
                for one, answer in zip(some, answers, strict=True):
                    self._answer(one, answer)
        finally:
            self._adding = False

    def _store(self, checked: list[Checked]) -> list[Added | Exception]:
        """On the writer's thread. Payloads first: a request that is refused leaves one behind, to be collected."""
        for data in {one.batch.sha1: one.data for one in checked if one.data is not None}.values():
            self._host.table.put_payload(data)
        return self._host.table.add([one.batch for one in checked])

    def _answer(self, waiting: _Waiting, answer: Added | Exception) -> None:
        if waiting.answer.done():
            return
        if isinstance(answer, Exception):
            waiting.answer.set_exception(answer)
            return
        waiting.answer.set_result(answer)
        if answer.repeated:
            return
        if answer.began:
            batch = waiting.checked.batch
            state = batch.begin.state if batch.begin is not None else State.RUNNING
            self._events.say(batch.request_id, answer.number, state, "it began")
        if answer.merged:
            self._host.trigger(waiting.checked.batch.ids)
            self._tell_others(Hint(merged=True))
        else:
            self._unmerged.set()

    # -- merging ---------------------------------------------------------------------------------------------

    def look_for_unmerged(self) -> None:
        """Somebody may have added something and not merged it."""
        self._unmerged.set()

    async def merge(self) -> None:
        """For as long as the node lives."""
        while True:
            await self._unmerged.wait()
            self._unmerged.clear()
            try:
                while await self._merge_run():
                    pass
            except StoreError as error:
                logger.warning("a merge of fan-out's parts is tried again: %s", error)
                self._unmerged.set()
                await asyncio.sleep(AGAIN_SECS)

    async def _merge_run(self) -> bool:
        parts, after = await self._host.ask(self._host.table.unmerged, RUN_IDS_MAX)
        if not parts:
            return False
        run = steps(parts, after)
        del parts
        while True:
            step: MergeStep | None = await self._host.ask(next, run, None)
            if step is None:
                break
            begun = self._loop.time()
            merged = await self._host.change(self._host.table.merge_step, step)
            if merged is None:
                return True  # somebody else is at it
            if merged.vins:
                self._host.trigger(merged.vins)
            await asyncio.sleep(REST_SHARE * (self._loop.time() - begun))
        self._tell_others(Hint(merged=True))
        return True
