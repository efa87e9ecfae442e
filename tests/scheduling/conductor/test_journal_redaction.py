"""A journal keeps what decisions depend on, and no token of a prompt or an answer."""

import msgspec

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.kv_events import BlockStored, KvEventBatch
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages import KvstoreAddress, PrefillDone, StartDecode
from halfmoon_protocol.messages.decode import AnswerChain
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_scheduling.commands import AnyCommand, Deliver, Send
from halfmoon_scheduling.conductor.journal import encode_entry
from halfmoon_scheduling.conductor.journal_redaction import redact
from halfmoon_scheduling.events import KvChanged, MessageReceived, RequestArrived, Tick
from halfmoon_testing.scheduling_inputs import a_request

WORKER = WorkerId("decode-0")
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
    done = PrefillDone(
        request_id=request_id,
        first_token=TOKENS[0],
        finish="",
        n_cached=0,
        queue_s=0.0,
        compute_s=0.0,
        drain_s=0.0,
        score=SCORE,
        prompt_scores=(SCORE,),
    )
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
    commands: list[AnyCommand] = [Deliver(request_id, TOKENS[2], "", 0), Send(WORKER, start)]
    for event in (
        RequestArrived(request),
        KvChanged(WORKER, KvEventBatch(0, 0.0, (stored,))),
        MessageReceived(WORKER, done),
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


def test_an_entry_without_tokens_is_the_same_object() -> None:
    tick = Tick()
    assert redact(tick) is tick
