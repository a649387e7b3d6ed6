"""Taking part in a shared group as a lease member, from Python: a set of streams under one version, batch by batch.

    with LeaseClient(node="127.0.0.1:1883", group="billing:vehicle/+/trip") as client:
        client.join()
        while True:
            version, pieces = client.assignment()
            for piece, held in pieces.items():
                ...                                      # read on from held.mark; held.done says what to leave out
                client.ack(piece, [(first, last)])       # acknowledged, or passed over
            client.drained()                             # the batch is over: what was taken over may go

`groups.lease` holds the machine that decides; this package drives it on a thread, over MQTT.
"""

from holdfast.leases.client import Assignment, Held, LeaseClient
from holdfast.leases.line import Line, MqttLine

__all__ = ["Assignment", "Held", "LeaseClient", "Line", "MqttLine"]
