"""The decoder reads both encodings of KV events, and no bytes make it fail otherwise."""

from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.errors import MalformedMessage
from halfmoon_servers.kv_events import payload_decoder
from halfmoon_servers.kv_events.payload_decoder import MAX_BATCH_EVENTS, decode_server_payload
from halfmoon_servers.kv_events.server_events import (
    MAX_EVENT_BLOCKS,
    ServerBlockRemoved,
    ServerBlockStored,
    ServerCacheCleared,
)


def encode(value: Any, order: Literal["sorted"] | None = None) -> bytes:
    return msgspec.msgpack.encode(value, order=order)


_hash = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=64)
_keys = st.lists(
    st.text(max_size=9) | st.tuples(st.text(max_size=9), st.integers(0, 99)) | st.binary(max_size=9)
)
_fields = st.fixed_dictionaries(
    {
        "block_hashes": st.lists(_hash, max_size=5),
        "parent_block_hash": st.none() | _hash,
        "token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=40),
        "block_size": st.integers(0, 512),
        "lora_id": st.none() | st.integers(0, 9),
        "medium": st.sampled_from([None, "GPU", "CPU", "STORAGE"]),
        "lora_name": st.none() | st.text(max_size=9),
        "extra_keys": st.none() | st.lists(st.none() | _keys, max_size=5),
        "group_idx": st.none() | st.integers(0, 9),
        "kv_cache_spec_kind": st.sampled_from([None, "full_attention", "mamba"]),
    }
)


def _plain(event: Any) -> Any:
    return msgspec.to_builtins(event, builtin_types=(bytes,))


@given(
    _fields,
    st.dictionaries(st.text(max_size=9), st.integers(0, 9), max_size=2),
    st.lists(st.none()),
)
def test_maps_and_arrays_give_the_same_event_and_what_is_more_is_ignored(
    fields: dict[str, Any], more_keys: dict[str, int], more_elements: list[None]
) -> None:
    more_keys = {f"_{key}": value for key, value in more_keys.items()}
    as_map = {"type": "BlockStored", **fields, **more_keys}
    in_order = [fields[name] for name in ServerBlockStored.__struct_fields__]
    as_array = ["BlockStored", *in_order, *more_elements]
    one, other = decode_server_payload(encode([1.5, [as_map, as_array], 0])).events
    assert one == other
    for alone in (as_map, as_array):
        assert decode_server_payload(encode([1.5, [alone, alone], 0])).events == (one, one)
    assert isinstance(one, ServerBlockStored)
    assert encode({"type": "BlockStored", **fields}, order="sorted") == encode(
        _plain(one), order="sorted"
    )


def test_short_arrays_of_sglang_have_no_medium() -> None:
    stored = ["BlockStored", [-5], 3, [1, 2], 2, None]
    batch = decode_server_payload(
        encode([1.0, [stored, ["BlockRemoved", [-5]], ["AllBlocksCleared"]]])
    )
    assert batch.events == (
        ServerBlockStored(block_hashes=(-5,), parent_block_hash=3, token_ids=(1, 2), block_size=2),
        ServerBlockRemoved(block_hashes=(-5,)),
        ServerCacheCleared(),
    )


def test_events_of_unknown_kinds_are_skipped_and_counted() -> None:
    payload = encode([1.0, [["Later", 1], {"type": "Other", "x": 1}, ["AllBlocksCleared"]], None])
    batch = decode_server_payload(payload)
    assert (batch.events, batch.n_unknown) == ((ServerCacheCleared(),), 2)


@pytest.mark.parametrize(
    "event",
    [
        7,
        [],
        ["BlockStored"],
        {"type": "BlockStored"},
        {"block_hashes": [1]},
        {"type": "BlockRemoved", "block_hashes": [1.5]},
        {"type": "BlockRemoved", "block_hashes": [b""]},
        {"type": "BlockRemoved", "block_hashes": [b"x" * 65]},
        {"type": "BlockRemoved", "block_hashes": [0] * (MAX_EVENT_BLOCKS + 1)},
        ["BlockStored", [1], None, [-1], 1, None],
        ["BlockStored", [1], None, [2**32], 1, None],
        ["BlockStored", [1], None, [1], -1, None],
    ],
)
def test_an_event_of_wrong_types_or_sizes_is_malformed(event: Any) -> None:
    with pytest.raises(MalformedMessage, match="not a KV event payload"):
        decode_server_payload(encode([1.0, [event], None]))


@pytest.mark.parametrize("event", [["AllBlocksCleared"], {"type": "AllBlocksCleared"}])
def test_payloads_over_a_bound_name_it(event: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [event] * (MAX_BATCH_EVENTS + 1)
    with pytest.raises(MalformedMessage, match="262145 events, over the limit of 262144"):
        decode_server_payload(encode([1.0, events, None]))
    monkeypatch.setattr(payload_decoder, "MAX_PAYLOAD_BYTES", 10)
    with pytest.raises(MalformedMessage, match="over the limit of 10"):
        decode_server_payload(encode([1.0, [event], None]))


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_a_length_that_the_bytes_do_not_have_allocates_nothing(header: bytes) -> None:
    head = b"\x92\xca\x3f\x80\x00\x00"
    removed = b"\x91\x92\xacBlockRemoved"
    for payload in (header, head + header, head + removed + header):
        with pytest.raises(MalformedMessage):
            decode_server_payload(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_malformed(data: bytes) -> None:
    head = b"\x92\xca\x3f\x80\x00\x00"
    for payload in (data, head + data, head + b"\x91" + data):
        try:
            decode_server_payload(payload)
        except MalformedMessage as error:
            assert len(str(error)) < 300


@given(
    st.recursive(
        st.none()
        | st.floats()
        | st.text(max_size=5)
        | st.binary()
        | st.integers(-(2**63), 2**64 - 1),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=12), inner),
    ),
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
)
def test_any_values_in_an_event_are_an_event_or_malformed(value: Any, kind: str) -> None:
    maps = (
        {"type": kind, **value} if isinstance(value, dict) else {"type": kind, "token_ids": value}
    )
    arrays = [kind, *value] if isinstance(value, list) else [kind, value]
    for event in (maps, arrays):
        try:
            decode_server_payload(encode([1.0, [event], None]))
        except MalformedMessage as error:
            assert len(str(error)) < 300


def test_deep_nesting_is_malformed() -> None:
    deep = b"\x92\xca\x3f\x80\x00\x00\x91\x92\xacBlockRemoved" + b"\x91" * 100_000
    with pytest.raises(MalformedMessage):
        decode_server_payload(deep)
