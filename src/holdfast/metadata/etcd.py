"""Metadata in etcd: a version is a key's mod_revision, and etcd keeps the leases.

`etcd://host:port[,host:port...][/prefix]`: with a prefix, several Holdfasts share one etcd. etcd counts leases
in whole seconds and takes up to a second to notice that one has expired: keys live longer there, never shorter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from urllib.parse import unquote

from holdfast.errors import RequestError, StoreUnavailable
from holdfast.metadata.contract import (
    Lease,
    LeaseEnded,
    Metadata,
    Preconditions,
    VersionMismatch,
    Versions,
    check_key,
    check_prefix,
    check_ttl,
)
from holdfast.metadata.entries import Change, Entry, Put
from holdfast.metadata.etcd_gateway import NOT_FOUND, OUT_OF_RANGE, EtcdError, Gateway, Json, decode, encode
from holdfast.metadata.etcd_watcher import EtcdWatcher
from holdfast.metadata.watch import Watch
from holdfast.restarts import Failure

TAKES = "etcd://host:port, with more members after commas, and /prefix where several share one etcd"

RETRY_SECONDS = 30.0
"""How long a call keeps trying while etcd is away, before it says so."""

PAGE_KEYS = 500


class EtcdMetadata(Metadata):
    batch_max = 128  # etcd's own limit (--max-txn-ops)

    def __init__(self, gateway: Gateway, prefix: str = ""):
        self._gateway = gateway
        self._prefix = prefix.encode()
        self._watcher = EtcdWatcher(gateway, self._bounds, self._local, self._snapshot)

    @classmethod
    def open(cls, url: str, retry_seconds: float = RETRY_SECONDS) -> EtcdMetadata:
        """Raises StoreUnavailable at once if nobody answers there."""
        members, _, prefix = url.removeprefix("etcd:").removeprefix("//").partition("/")
        gateway = Gateway([_endpoint(url, member) for member in members.split(",")], retry_seconds)
        try:
            gateway.call_once("/v3/maintenance/status", {}, repeatable=True)
        except BaseException:
            gateway.close()
            raise
        prefix = unquote(prefix).strip("/")
        return cls(gateway, f"/{prefix}/" if prefix else "")

    def _key(self, key: str) -> str:
        return encode(self._prefix + key.encode())

    def _local(self, kv: Json) -> str:
        # A foreign key between ours may be no text; it is nobody's, and must not stop the others.
        return decode(kv["key"]).removeprefix(self._prefix).decode(errors="surrogateescape")

    def _bounds(self, *prefixes: str) -> Json:
        """The range of etcd's keys that holds all that start with one of these."""
        starts = [self._prefix + prefix.encode() for prefix in prefixes]
        ends = [start.rstrip(b"\xff") for start in starts]
        # A zero byte stands for no end.
        end = max(end[:-1] + bytes([end[-1] + 1]) for end in ends) if all(ends) else b"\0"
        return {"key": encode(min(starts) or b"\0"), "range_end": encode(end)}

    def get(self, key: str) -> Entry | None:
        check_key(key)
        found = self._gateway.call("/v3/kv/range", {"key": self._key(key)}, repeatable=True)
        return next((_entry(kv) for kv in found.get("kvs", ())), None)

    def list(self, prefix: str) -> dict[str, Entry]:
        return self._snapshot(check_prefix(prefix))[1]

    def _snapshot(self, prefix: str, keys_only: bool = False) -> tuple[int, dict[str, Entry]]:
        """All of one revision, in pages; from the start again if etcd forgets that revision halfway."""
        while True:
            try:
                return self._pages(prefix, keys_only)
            except EtcdError as error:
                if error.code != OUT_OF_RANGE:
                    raise

    def _pages(self, prefix: str, keys_only: bool) -> tuple[int, dict[str, Entry]]:
        query = {**self._bounds(prefix), "limit": PAGE_KEYS, "keys_only": keys_only}
        revision = 0
        entries: dict[str, Entry] = {}
        while True:
            page = self._gateway.call("/v3/kv/range", query, repeatable=True)
            revision = revision or int(page["header"]["revision"])
            kvs = page.get("kvs", [])
            entries |= {self._local(kv): _entry(kv) for kv in kvs}
            if not page.get("more"):
                return revision, entries
            query |= {"key": encode(decode(kvs[-1]["key"]) + b"\0"), "revision": revision}

    def _commit(self, changes: Sequence[Change], preconditions: Preconditions) -> Versions | VersionMismatch:
        keys = list(preconditions)
        request = {
            "compare": [
                {"key": self._key(k), "target": "MOD", "result": "EQUAL", "mod_revision": preconditions[k] or 0}
                for k in keys
            ],
            "success": [self._request(change) for change in changes],
            "failure": [{"request_range": {"key": self._key(key), "keys_only": True}} for key in keys],
        }
        try:
            answer = self._gateway.call("/v3/kv/txn", request, repeatable=False)
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise
            leases = [change.lease for change in changes if isinstance(change, Put) and change.lease]
            raise LeaseEnded(f"one of {leases} has ended; nothing was stored") from error
        responses = answer.get("responses", [])
        if not answer.get("succeeded"):
            found = [_first_version(response["response_range"]) for response in responses]
            differs = (VersionMismatch(k, preconditions[k], v) for k, v in zip(keys, found, strict=True))
            return next(mismatch for mismatch in differs if mismatch.expected != mismatch.found)
        revision = int(answer["header"]["revision"])
        return [
            revision if isinstance(change, Put) or response["response_delete_range"].get("deleted") else None
            for change, response in zip(changes, responses, strict=True)
        ]

    def _request(self, change: Change) -> Json:
        if isinstance(change, Put):
            lease = change.lease.id if change.lease else 0
            return {"request_put": {"key": self._key(change.key), "value": encode(change.value), "lease": lease}}
        return {"request_delete_range": {"key": self._key(change.key)}}

    def watch(self, prefix: str, wake: Callable[[], None] | None = None) -> Watch:
        return self._watcher.add(check_prefix(prefix), wake)

    @property
    def watch_failure(self) -> Failure | None:
        return self._watcher.failure

    def lease(self, ttl_seconds: float) -> Lease:
        seconds = math.ceil(check_ttl(ttl_seconds))
        asked_at = time.monotonic()
        # Repeated after an unknown outcome it may leave a lease that nobody knows: it expires.
        granted = self._gateway.call("/v3/lease/grant", {"TTL": seconds}, repeatable=True)
        return Lease(self, int(granted["ID"]), float(granted["TTL"]), asked_at)

    def _renew(self, lease: Lease) -> None:
        def over() -> bool:
            return lease.remaining_seconds <= 0

        try:
            left = self._gateway.call("/v3/lease/keepalive", {"ID": lease.id}, repeatable=True, give_up=over)
        except StoreUnavailable as error:
            if over():
                raise LeaseEnded(f"{lease} has ended while the store was away: {error}") from error
            raise
        if int(left.get("TTL", 0)) <= 0:
            raise LeaseEnded(f"{lease} has ended")

    def _revoke(self, lease: Lease) -> None:
        try:
            self._gateway.call("/v3/lease/revoke", {"ID": lease.id}, repeatable=True)
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise

    def close(self) -> None:
        self._gateway.close()  # first, so that the watcher does not wait for an etcd that is away
        self._watcher.close()


def _entry(kv: Json) -> Entry:
    return Entry(decode(kv.get("value", "")), int(kv["mod_revision"]))


def _first_version(found: Json) -> int | None:
    return next((int(kv["mod_revision"]) for kv in found.get("kvs", ())), None)


def _endpoint(url: str, member: str) -> tuple[str, int]:
    host, colon, port = member.rpartition(":")
    if not colon:
        host, port = port, "2379"
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RequestError(f"metadata {url!r} names no member in {member!r}; it takes {TAKES}")
    return host.strip("[]"), int(port)
