"""What a node counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from holdfast.runtime.node import Node


class Metrics(Collector):
    """Counted where it happens per batch, read off the node when asked: nothing per message."""

    def __init__(self, node: Node):
        self._node = node
        self.registry = CollectorRegistry()
        self.refused = Counter(
            "holdfast_connections_refused", "Connections refused or ended by us", registry=self.registry
        )
        self.banned = Counter(
            "holdfast_connections_banned", "CONNECTs refused because of a ban", registry=self.registry
        )
        self.flushed = Counter("holdfast_cursors_flushed", "Cursors saved", registry=self.registry)
        self.failed = Counter("holdfast_commits_failed", "Commits that failed", registry=self.registry)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        node = self._node
        yield CounterMetricFamily(
            "holdfast_messages_published", "Messages stored for clients", value=node.ingest.messages
        )
        yield CounterMetricFamily("holdfast_commits", "Commits of messages", value=node.ingest.commits)
        yield GaugeMetricFamily("holdfast_connections", "Open connections", value=len(node.sessions.connections))
        yield GaugeMetricFamily("holdfast_sessions", "Sessions, connected or not", value=len(node.sessions))
        yield GaugeMetricFamily(
            "holdfast_subscriptions", "Subscriptions of connected sessions", value=len(node.delivery.machine.live)
        )
        yield GaugeMetricFamily("holdfast_retained", "Retained messages", value=len(node.delivery.machine.retained))
        fanout, results = node.fanout, node.fanout_results
        yield GaugeMetricFamily("holdfast_fanout_vehicles", "Vehicles connected to this node", value=fanout.vehicles())
        yield CounterMetricFamily("holdfast_fanout_sent", "Deliveries sent to vehicles", value=fanout.sent)
        yield CounterMetricFamily("holdfast_fanout_answered", "Deliveries answered by vehicles", value=fanout.answered)
        yield CounterMetricFamily(
            "holdfast_fanout_unmatched_acks", "Answers to nothing in flight", value=fanout.unmatched
        )
        yield CounterMetricFamily(
            "holdfast_fanout_results", "Results of vehicles that were settled", value=results.settled
        )
        yield CounterMetricFamily(
            "holdfast_fanout_unmatched_results", "Results that belong to no delivery", value=results.unmatched
        )
        yield CounterMetricFamily(
            "holdfast_fanout_collected", "Rows removed because they are old", value=node.fanout_keeper.collected
        )
        heads = GaugeMetricFamily("holdfast_stream_messages", "Messages in a stream", labels=["stream"])
        for stream, head in node.delivery.heads.items():
            heads.add_metric([str(stream)], head)
        yield heads
