"""KV events: vLLM's frames, in both of its encodings."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol import kv_events, schema
from halfmoon_protocol.errors import MalformedMessage
from halfmoon_protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
    decode_payload,
    decode_sequence,
    encode_payload,
    encode_sequence,
)

STORED = BlockStored(
    block_hashes=(b"a" * 16,), parent_block_hash=None, token_ids=(1, 2), block_size=2, medium="CPU"
)


def without_tokens(event: KvEvent) -> KvEvent:
    is_stored = isinstance(event, BlockStored)
    return msgspec.structs.replace(event, token_ids=()) if is_stored else event


def test_golden_batches_are_read_and_written_the_same() -> None:
    golden = schema.HOME / "golden" / "kv_events.json"
    for case in json.loads(golden.read_text()):
        payload = bytes.fromhex(case["payload_hex"])
        batch = decode_payload(payload, decode_sequence(bytes.fromhex(case["sequence_hex"])))
        timestamp, rows, rank = msgspec.msgpack.decode(payload)
        whole = msgspec.convert(rows, tuple[KvEvent, ...], strict=False)
        assert encode_payload(whole, timestamp) == payload and rank is None
        assert batch.events == tuple(map(without_tokens, whole))
        assert batch.timestamp == timestamp


def test_positional_events_with_more_elements_than_we_know_are_read() -> None:
    row = ["BlockStored", [5, 6], 4, [1, 2], 1, None, "GPU", "of a later version"]
    batch = decode_payload(msgspec.msgpack.encode([1.0, [row, ["AllBlocksCleared"]], 0]), 0)
    stored = BlockStored(
        block_hashes=(5, 6), parent_block_hash=4, token_ids=(), block_size=1, medium="GPU"
    )
    assert batch.events == (stored, AllBlocksCleared())


def as_array(event: KvEvent, n_fields: int) -> list[object]:
    """An event as vLLM wrote it before it wrote maps; earlier versions know fewer fields."""
    fields = [getattr(event, name) for name in event.__struct_fields__]
    return [type(event).__name__, *fields[:n_fields]]


hashes = st.lists(st.integers(0, 2**64 - 1) | st.binary(max_size=32), max_size=4).map(tuple)
media = st.sampled_from([None, "GPU", "CPU", "STORAGE"])
events = st.one_of(
    st.builds(
        BlockStored,
        block_hashes=hashes,
        parent_block_hash=st.none() | st.integers(0, 2**64 - 1) | st.binary(max_size=32),
        token_ids=st.lists(st.integers(0, 2**31), max_size=8).map(tuple),
        block_size=st.integers(1, 64),
        lora_id=st.none() | st.integers(0, 9),
        medium=media,
    ),
    st.builds(BlockRemoved, block_hashes=hashes, medium=media),
    st.just(AllBlocksCleared()),
)


@given(st.lists(events, max_size=5), st.integers(0, 2**62))
def test_maps_and_arrays_say_the_same(batch: list[KvEvent], sequence: int) -> None:
    rows = [as_array(event, n_fields=9) for event in batch]
    arrays = msgspec.msgpack.encode([12.5, rows, None])
    expected = KvEventBatch(sequence, 12.5, tuple(map(without_tokens, batch)))
    assert decode_payload(arrays, sequence) == expected
    again = decode_sequence(encode_sequence(sequence))
    assert decode_payload(encode_payload(batch, 12.5), again) == expected


def test_arrays_of_versions_that_know_no_medium_are_read() -> None:
    payload = msgspec.msgpack.encode([1.0, [as_array(STORED, 4), ["BlockRemoved", [7]]]])
    stored, removed = decode_payload(payload, 0).events
    assert stored == msgspec.structs.replace(STORED, token_ids=(), medium=None)
    assert removed == BlockRemoved(block_hashes=(7,))


def test_unknown_fields_and_unknown_events_are_left_out() -> None:
    rows = [
        {"type": "BlockRemoved", "block_hashes": [1], "medium": None, "group_idx": 0},
        {"type": "SomethingNew", "x": 1},
    ]
    batch = decode_payload(msgspec.msgpack.encode([1, rows]), 0)
    assert batch.events == (BlockRemoved(block_hashes=(1,)),)


def a_map(**fields: object) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": [b"a" * 16],
        "parent_block_hash": None,
        "block_size": 2,
        **fields,
    }


@pytest.mark.parametrize(
    "row",
    [
        a_map(),
        a_map(token_ids=[]),
        a_map(token_ids=[1, 2]),
        a_map(token_ids=[-1, 2**64 - 1]),
        a_map(token_ids=[1] * 100_000),
        a_map(token_ids="no list"),
        a_map(token_ids={"x": [[None]]}),
        ["BlockStored", [b"a" * 16], None, [1, 2], 2],
        ["BlockStored", [b"a" * 16], None, [], 2],
        ["BlockStored", [b"a" * 16], None, {"x": -1}, 2],
    ],
)
def test_tokens_are_skipped_whatever_they_are(row: object) -> None:
    (stored,) = decode_payload(msgspec.msgpack.encode([1, [row]]), 0).events
    assert stored == msgspec.structs.replace(STORED, token_ids=(), medium=None)


@pytest.mark.parametrize("tokens", [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc1"])
@pytest.mark.parametrize("is_array", [False, True])
def test_tokens_that_are_no_value_are_malformed(tokens: bytes, is_array: bool) -> None:
    head = msgspec.msgpack.encode([1, [["BlockStored", [], None, 0]]])[:-1]
    if not is_array:
        head = msgspec.msgpack.encode([1, [a_map(token_ids=0)]])[:-1]
    with pytest.raises(MalformedMessage):
        decode_payload(head + tokens, 0)


def test_more_events_than_the_limit_are_refused_before_any_is_decoded() -> None:
    limit = kv_events.MAX_EVENTS
    for row in (0x91, 0xC1):  # an array with what follows, and no value at all
        events = b"\xdd" + (limit + 1).to_bytes(4, "big") + bytes([row]) * (limit + 1)
        with pytest.raises(MalformedMessage, match=f"length <= {limit}"):
            decode_payload(b"\x92\x01" + events, 0)
    removed = BlockRemoved(block_hashes=(b"a",))
    batch = decode_payload(encode_payload([removed] * limit, 1.0), 0)
    assert len(batch.events) == limit


NO_TEXT = encode_payload([STORED], 0.0).replace(b"BlockStored", b"\xe3lockStored")
NO_BATCHES = [b"", b"\xc1", b"\x90", b"\x01", b"\x92\x01\x02", b"\xa3abc", NO_TEXT]


@pytest.mark.parametrize("payload", NO_BATCHES, ids=range(len(NO_BATCHES)))
def test_what_is_not_a_batch_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedMessage, match="not a KV event batch"):
        decode_payload(payload, 0)
    with pytest.raises(MalformedMessage, match="7 bytes"):
        decode_sequence(bytes(7))
