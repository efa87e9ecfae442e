"""Trace leases at a kvstore, from the request to the answer, reads from the disk included."""

from halfmoon_protocol.ids import Ticket
from halfmoon_protocol.messages import BlocksLeased, LeaseBlocks
from halfmoon_runtime.channels.network import PeerId
from halfmoon_runtime.observability.tracing import Attributes, Span, Tracer


class LeaseSpans:
    """Keep the spans of sampled leases until their answer; without a tracer, keep none."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._waiting: dict[tuple[PeerId, Ticket], Span] = {}

    def on_asked(self, peer: PeerId, wanted: LeaseBlocks, now_s: float) -> None:
        """Start the span of a requested lease."""
        if self._tracer is None or wanted.trace is None:
            return
        said: Attributes = {"halfmoon.blocks_asked": len(wanted.hashes)}
        if span := self._tracer.join(wanted.trace, "lease", now_s, said):
            self._waiting[peer, wanted.ticket] = span

    def on_answered(self, peer: PeerId, leased: BlocksLeased, now_s: float) -> None:
        """End the span of a granted lease, with the number of leased blocks."""
        if span := self._waiting.pop((peer, leased.ticket), None):
            span.set(
                {
                    "halfmoon.blocks": len(leased.places),
                    "halfmoon.blocks_from_disk": leased.n_from_disk,
                }
            )
            span.end(now_s)

    def on_refused(self, peer: PeerId, ticket: Ticket, reason: str, now_s: float) -> None:
        """End the span of a refused lease."""
        if span := self._waiting.pop((peer, ticket), None):
            span.end(now_s, reason)

    def on_given_up(self, peer: PeerId, ticket: Ticket, now_s: float) -> None:
        """End the span of a lease that its caller gave up, if it was not answered before."""
        if span := self._waiting.pop((peer, ticket), None):
            span.event("given up", now_s)
            span.end(now_s)

    def on_peer_lost(self, peer: PeerId, now_s: float) -> None:
        """End the spans of a caller that is gone."""
        for key in [key for key in self._waiting if key[0] == peer]:
            self._waiting.pop(key).end(now_s, "the client is gone")
