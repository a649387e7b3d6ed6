"""Taking part in a shared group as a batch member, from Python: a set of streams under one version, batch by batch.

    with BatchClient(node="127.0.0.1:1883", group="billing:vehicle/+/trip") as client:
        client.join()
        while True:
            version, pieces = client.assignment()
            for piece, held in pieces.items():
                ...                                      # read on from held.mark; held.done says what to leave out
                client.ack(piece, [(first, last)])       # acknowledged, or passed over
            client.drained()                             # the batch is over: what was taken over may go

`groups.member.batch_member` holds the machine that decides; this package drives it on a thread, over MQTT.
"""

from holdfast.batch.client import Assignment, BatchClient, HeldPiece
from holdfast.batch.line import Line, MqttLine

__all__ = ["Assignment", "BatchClient", "HeldPiece", "Line", "MqttLine"]
