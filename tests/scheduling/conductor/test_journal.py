from io import BytesIO

import pytest

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.kv_events import AllBlocksCleared, BlockRemoved, KvEventBatch
from halfmoon_protocol.messages import BlocksSnapshot
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.journal import (
    BadJournal,
    encode_entry,
    encode_header,
    read_journal,
    replay_journal,
)
from halfmoon_scheduling.conductor.journal_redaction import redact
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    KvChanged,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_testing.scheduling_inputs import a_request, a_worker
from tests.scheduling.core import K0, kv_stored

REQUEST = a_request(n_tokens=100, tenant="a", priority=3, tbt_slo_s=float("inf"))
#: One of each kind, and of each kind of KV event.
EVENTS: list[AnyEvent] = [
    WorkerJoined(a_worker("prefill-0")),
    WorkerJoined(a_worker("decode-0")),
    WorkerJoined(a_worker("kvstore-0")),
    MessageReceived(K0, BlocksSnapshot(sequence=-1, hashes=())),
    KvChanged(K0, kv_stored(REQUEST.block_hashes)),
    KvChanged(K0, KvEventBatch(1, 0.1, (BlockRemoved(block_hashes=REQUEST.block_hashes[3:]),))),
    RequestArrived(REQUEST),
    RequestArrived(a_request("cmpl-2")),
    RequestFinished(RequestId("cmpl-2"), 5),
    KvChanged(K0, KvEventBatch(2, 0.2, (AllBlocksCleared(),))),
    RequestCancelled(REQUEST.request_id),
    WorkerLost(K0, "gone"),
    Tick(),
]


def a_journal(config: SchedulingConfig, events: list[AnyEvent]) -> bytes:
    core = Conductor(config)
    written = encode_header(config)
    for i, event in enumerate(events):
        written += encode_entry(0.1 * i, event, core.handle(event, 0.1 * i))
    return written


def test_what_is_written_is_read_and_replays() -> None:
    config = SchedulingConfig(placement="min_ttft", admission="lookahead", tbt_slo_s=0.5)
    journal = a_journal(config, EVENTS)
    header, entries = read_journal(BytesIO(journal))
    assert header.config == config
    assert [entry.event for entry in entries] == [redact(event) for event in EVENTS]
    assert replay_journal(BytesIO(journal)) == (len(EVENTS), None)


def test_a_replay_stops_at_the_first_difference() -> None:
    journal = encode_header(SchedulingConfig()) + encode_entry(0.0, EVENTS[0], [])
    journal += encode_entry(1.0, RequestArrived(REQUEST), []) + encode_entry(2.0, Tick(), [])
    n_same, difference = replay_journal(BytesIO(journal))
    assert n_same == 1
    assert difference is not None
    assert (difference.number, difference.entry.now) == (1, 1.0)
    assert difference.actual  # "no decode worker is live", where nothing was recorded


def test_a_journal_cut_off_anywhere_replays_up_to_there() -> None:
    journal = a_journal(SchedulingConfig(), EVENTS)
    n_header = len(encode_header(SchedulingConfig()))
    lengths = set()
    for end in range(n_header, len(journal), 7):
        n_same, difference = replay_journal(BytesIO(journal[:end]))
        assert difference is None
        lengths.add(n_same)
    assert lengths == set(range(len(EVENTS)))


@pytest.mark.parametrize(
    ("journal", "message"),
    [
        (b"", "begins with"),
        (b"halfmoon journal 2\n", "begins with"),
        (b"halfmoon journal 1\n", "before its header"),
        (b"halfmoon journal 1\n\x01\x00\x00\x00\xc1", "header can't be read"),
        (b"halfmoon journal 1\n\xff\xff\xff\xff", "over the limit"),
        (encode_header(SchedulingConfig()) + b"\x01\x00\x00\x00\xc0", "record can't be read"),
    ],
)
def test_what_is_no_journal_is_refused_with_the_reason(journal: bytes, message: str) -> None:
    with pytest.raises(BadJournal, match=message):
        replay_journal(BytesIO(journal))
