"""The spans of leases: whichever way one ends, its span ends then and says how."""

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from halfmoon_kvstore.lease_spans import LeaseSpans
from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import BlocksLeased, LeaseBlocks, Place
from halfmoon_protocol.regions import Region
from halfmoon_protocol.trace_context import TraceContext
from halfmoon_runtime.channels.network import PeerId
from halfmoon_runtime.observability.otel import OtelTracer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
LAYOUT = KvLayout(model="m", n_layers=1, n_kv_heads=1, head_dim=1, dtype="float32", block_size=1)
BLOCKS = tuple(BlockHash(bytes([i])) for i in range(4))
A, B = PeerId(b"a"), PeerId(b"b")
TICKET = Ticket("1")


def wanted(ticket: Ticket = TICKET, flags: str = "01") -> LeaseBlocks:
    trace = TraceContext(f"00-{TRACE}-{PARENT}-{flags}") if flags else None
    return LeaseBlocks(ticket=ticket, layout=LAYOUT, hashes=BLOCKS, trace=trace)


class Kept:
    """Leases of a kvstore, and the spans of those that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        processor = SimpleSpanProcessor(self._exporter)
        self.traces = LeaseSpans(OtelTracer("halfmoon-kvstore", "kvstore-0", processor))

    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def ask(self, peer: PeerId = A, ticket: Ticket = TICKET, flags: str = "01") -> None:
        self.traces.on_asked(peer, wanted(ticket, flags), 1.0)

    def answer(self, peer: PeerId = A, ticket: Ticket = TICKET) -> None:
        leased = BlocksLeased(
            ticket=ticket,
            region=Region(segment="kvstore-0", generation=1, key=bytes(16), length=4),
            places=tuple(Place(block, 0) for block in BLOCKS[:3]),
            expires_s=1.0,
            n_from_disk=2,
        )
        self.traces.on_answered(peer, leased, 3.5)


def test_an_answer_ends_it_with_what_is_held_and_what_came_from_the_disk() -> None:
    kept = Kept()
    kept.ask()
    assert kept.spans() == []
    kept.answer()
    (span,) = kept.spans()
    assert span.name == "lease"
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT
    assert span.start_time is not None and span.end_time is not None
    assert span.end_time - span.start_time == 2_500_000_000
    assert dict(span.attributes or {}) == {
        "halfmoon.blocks_asked": 4,
        "halfmoon.blocks": 3,
        "halfmoon.blocks_from_disk": 2,
    }
    assert span.status.is_ok


def test_who_asked_may_give_it_up_and_once_it_is_answered_that_changes_nothing() -> None:
    kept = Kept()
    kept.ask()
    kept.ask(B)
    kept.answer(B)
    for peer in (A, B):
        kept.traces.on_given_up(peer, TICKET, 4.0)
    answered, given_up = kept.spans()
    assert [event.name for event in given_up.events] == ["given up"]
    assert not answered.events
    assert given_up.status.is_ok


def test_a_lost_caller_ends_its_own_and_no_others() -> None:
    kept = Kept()
    kept.ask()
    kept.ask(A, Ticket("2"))
    kept.ask(B)
    kept.traces.on_peer_lost(A, 2.0)
    assert [span.status.is_ok for span in kept.spans()] == [False, False]
    kept.answer(B)
    assert kept.spans()[-1].status.is_ok


@pytest.mark.parametrize("flags", ["00", ""], ids=["not sampled", "no context"])
def test_who_is_not_sampled_has_none(flags: str) -> None:
    kept = Kept()
    kept.ask(flags=flags)
    kept.answer()
    assert kept.spans() == []


def test_without_a_tracer_nothing_is_kept() -> None:
    traces = LeaseSpans()
    traces.on_asked(A, wanted(), 1.0)
    traces.on_peer_lost(A, 2.0)
