"""Coverage-guided fuzzing of the codec: `python tests/fuzz/fuzz_codec.py -runs=1000000`.

Whatever the bytes: a packet that means the same after another trip over the wire, or a PeerError. Anything
else that is raised stops the run, and libFuzzer writes the input that did it.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["holdfast"]):
    from holdfast.errors import PeerError
    from holdfast.mqtt import codec, packets, properties

VERSIONS = (packets.V31, packets.V311, packets.V5)


def one_input(data: bytes) -> None:
    if len(data) < 2:
        return
    version, data = VERSIONS[data[0] % 3], data[1:]
    _frames(data)
    for decode in (codec.decode, codec.decode_for_client):
        try:
            packet = decode(data[0], data[1:], version)
        except PeerError as error:
            codec.farewell(error, data[0], data[1:], None, explain=True)
            codec.farewell(error, data[0], data[1:], version, explain=True)
            continue
        wire = codec.encode(packet, version)
        first, start, stop = codec.frame(wire) or (0, 0, 0)
        if stop != len(wire) or decode(first, wire[start:stop], version) != packet:
            raise AssertionError(f"{packet} is not the same after another trip over the wire")
    _properties(data)


def _frames(data: bytes) -> None:
    at = 0
    try:
        while (found := codec.frame(data, at, 1 << 16)) is not None:
            at = found[2]
    except PeerError:
        pass


def _properties(raw: bytes) -> None:
    try:
        kept, _ = properties.forwardable(raw)
    except PeerError:
        return
    if properties.forwardable(kept) != (kept, 0):
        raise AssertionError(f"{raw!r} is forwardable as {kept!r}, which is not")
    properties.decode_publish(kept)
    has_expiry = properties.expiry_of(kept) is not None
    if properties.expiry_of(properties.with_expiry(kept, 7)) != (7 if has_expiry else None):
        raise AssertionError(f"the expiry of {kept!r} cannot be rewritten")


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
