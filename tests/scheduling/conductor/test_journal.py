"""A journal replays to the same commands, and keeps no token of a prompt or an answer."""

from io import BytesIO

import msgspec
import pytest

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages import BlocksSnapshot, KvstoreAddress, StartDecode
from halfmoon_protocol.messages.decode import AnswerChain
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_scheduling.commands import AnyCommand, Deliver, Send
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
    RoleChangeRequested,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_testing.scheduling_inputs import a_request, a_worker
from tests.scheduling.core import D0, K0, kv_stored, prefill_done

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
    RoleChangeRequested(D0, "prefill"),
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


# -- what is left out ----------------------------------------------------------------------------


#: No number of an entry but a token is as large.
TOKENS = (4_000_111, 4_000_222, 4_000_333)
SAMPLING = Sampling(grammar='{"const": "quincunx"}')
SCORE = TokenScore(-0.5, 1, ((TOKENS[0], -0.5),))


def spoken(entry: bytes) -> list[bytes]:
    """Return which tokens and texts an encoded entry holds."""
    return [each for each in [*map(msgspec.msgpack.encode, TOKENS), b"quincunx"] if each in entry]


def test_events_and_commands_are_written_without_their_tokens() -> None:
    request = msgspec.structs.replace(a_request(n_tokens=3), token_ids=TOKENS, sampling=SAMPLING)
    request_id = RequestId("cmpl-1")
    stored = BlockStored(
        block_hashes=(b"1" * 16,), parent_block_hash=None, token_ids=TOKENS, block_size=3
    )
    done = prefill_done(request_id, score=SCORE, prompt_scores=(SCORE,))
    store = KvstoreAddress(WorkerId("kvstore-0"), 1, "tcp://127.0.0.1:1")
    start = StartDecode(
        request_id=request_id,
        first_token=TOKENS[1],
        sampling=SAMPLING,
        stopping=Stopping(max_new_tokens=4),
        n_prompt=3,
        history=TOKENS,
        answer_chain=AnswerChain(store, BlockHash(b"0" * 16), TOKENS),
    )
    commands: list[AnyCommand] = [Deliver(request_id, TOKENS[2], "", 0), Send(D0, start)]
    for event in (
        RequestArrived(request),
        KvChanged(D0, KvEventBatch(0, 0.0, (stored,))),
        MessageReceived(D0, done),
    ):
        assert spoken(msgspec.msgpack.encode(event))
        assert not spoken(encode_entry(1.0, event, commands))


def test_what_decisions_depend_on_stays() -> None:
    request = msgspec.structs.replace(a_request(n_tokens=100), sampling=SAMPLING)
    redacted = redact(request)
    assert redacted.token_ids == (0,) * 100
    assert redacted.sampling.needs_history
    kept = {name: getattr(request, name) for name in ("token_ids", "sampling")}
    assert msgspec.structs.replace(redacted, **kept) == request
