"""Hashes of blocks and of objects: equal exactly when all that they are made of is equal."""

import hashlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol import schema
from halfmoon_protocol.blocks import block_hashes, child_hashes, root_hash
from halfmoon_protocol.errors import LayoutMismatch, MalformedMessage, ProtocolError
from halfmoon_protocol.examples import LAYOUT
from halfmoon_protocol.ids import RequestId, original_request_id, retry_id
from halfmoon_protocol.objects import OBJECT_HEAD_BYTES, ObjectHead, object_hashes

# -- blocks ---------------------------------------------------------------------------------------


GOLDEN = schema.HOME / "golden" / "block_hashes.json"
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def written_out(token_ids: list[int], model: str, salt: str, size: int) -> list[bytes]:
    """The docstring's recipe, step by step, with nothing shared with the code under test."""
    data = b"halfmoon.block.v1" + struct.pack("<I", size)
    for text in (model.encode(), salt.encode()):
        data += struct.pack("<I", len(text)) + text
    parent = hashlib.sha256(data).digest()[:16]
    hashes = []
    for block in range(len(token_ids) // size):
        words = token_ids[block * size : (block + 1) * size]
        parent = hashlib.sha256(parent + struct.pack(f"<{size}I", *words)).digest()[:16]
        hashes.append(parent)
    return hashes


@given(tokens, st.text(max_size=8), st.text(max_size=8), st.sampled_from([16, 17, 32]))
def test_hashes_follow_the_recipe(token_ids: list[int], model: str, salt: str, size: int) -> None:
    expected = written_out(token_ids, model, salt, size)
    assert block_hashes(token_ids, model=model, salt=salt, block_size=size) == expected


def test_golden_hashes_are_what_we_compute() -> None:
    for case in json.loads(GOLDEN.read_text()):
        root_hex, hashes_hex, tokens = (
            case.pop(f) for f in ("root_hex", "hashes_hex", "token_ids")
        )
        how = {name: case[name] for name in ("model", "salt", "block_size")}
        assert root_hash(**how).hex() == root_hex
        assert [block.hex() for block in block_hashes(tokens, **how)] == hashes_hex


def test_a_token_id_or_a_block_size_out_of_range_is_refused() -> None:
    for token in (-1, 2**32, 1.5, "x"):
        with pytest.raises(ProtocolError, match="token ids"):
            block_hashes([token] * 16, model="m", block_size=16)  # type: ignore[list-item]
    for size in (0, 15, 513):
        with pytest.raises(ProtocolError, match=f"{size}, allowed are 16 to 512"):
            block_hashes([1], model="m", block_size=size)


def test_a_layout_mismatch_names_the_field_and_both_values() -> None:
    other = type(LAYOUT)(
        model=LAYOUT.model, n_layers=2, n_kv_heads=4, head_dim=16, dtype="float32", block_size=32
    )
    with pytest.raises(LayoutMismatch) as caught:
        LAYOUT.require_same(other, "prefill-0", "decode-1")
    text = str(caught.value)
    assert "block_size is 16 at prefill-0, 32 at decode-1" in text
    assert "n_kv_heads is 2 at prefill-0, 4 at decode-1" in text
    assert "head_dim" not in text


def test_a_retry_belongs_to_the_clients_request() -> None:
    first = RequestId("cmpl-1")
    assert retry_id(retry_id(first, 2), 3) == "cmpl-1~3"
    assert original_request_id(retry_id(first, 3)) == original_request_id(first) == "cmpl-1"


def test_child_hashes_go_on_behind_any_block_of_a_prompt() -> None:
    prompt = list(range(100))
    whole = block_hashes(prompt, model="m", salt="s", block_size=16)
    root = root_hash(model="m", salt="s", block_size=16)
    assert child_hashes(root, prompt, block_size=16) == whole
    for n in range(1, len(whole)):
        assert child_hashes(whole[n - 1], prompt[16 * n :], block_size=16) == whole[n:]
    assert child_hashes(whole[0], prompt[:15], block_size=16) == []
    with pytest.raises(ProtocolError, match="token ids"):
        child_hashes(whole[0], [-1] * 16, block_size=16)


# -- objects --------------------------------------------------------------------------------------


def test_hashes_follow_from_the_key_and_the_block_size_alone() -> None:
    hashes = object_hashes("a/b", 3, 4096)
    assert [h.hex() for h in hashes] == GOLDEN_OBJECTS
    assert object_hashes("a/b", 1, 4096) == hashes[:1]
    others = {*object_hashes("a/c", 3, 4096), *object_hashes("a/b", 3, 8192)}
    assert len({*hashes, *others}) == 9


@pytest.mark.parametrize("key", ["", "k" * 1025])
def test_a_key_that_is_empty_or_too_long_is_refused(key: str) -> None:
    with pytest.raises(MalformedMessage, match="1 to 1024"):
        object_hashes(key, 1, 4096)


@pytest.mark.parametrize(("n_bytes", "n_blocks"), [(0, 1), (68, 1), (69, 2), (168, 2), (169, 3)])
def test_a_head_comes_back_and_tells_how_many_blocks_there_are(n_bytes: int, n_blocks: int) -> None:
    head = ObjectHead(n_bytes, bytes(range(16)))
    encoded = head.encode()
    assert len(encoded) == OBJECT_HEAD_BYTES == 32
    assert ObjectHead.decode(encoded + b"bytes") == head
    assert head.n_blocks(block_bytes=100) == n_blocks


@pytest.mark.parametrize("block", [b"", b"HMOBJ1", bytes(64)])
def test_a_block_of_something_else_is_none_of_an_object(block: bytes) -> None:
    with pytest.raises(MalformedMessage):
        ObjectHead.decode(block)


#: Computed apart from the code, from the definition.
GOLDEN_OBJECTS = [
    "13c8a81d1221cbe16bdcd31c364ca454",
    "04863f6a587eff96782b1b45726f2160",
    "05f452d96922110cc8ebf110d37a3a8c",
]
