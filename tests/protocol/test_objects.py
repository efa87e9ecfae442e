"""Names and heads of objects: bytes under keys, as blocks."""

import pytest

from halfmoon_protocol.errors import MalformedMessage
from halfmoon_protocol.objects import OBJECT_HEAD_BYTES, ObjectHead, object_hashes


def test_hashes_follow_from_the_key_and_the_block_size_alone() -> None:
    hashes = object_hashes("a/b", 3, 4096)
    assert [h.hex() for h in hashes] == GOLDEN
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
GOLDEN = [
    "13c8a81d1221cbe16bdcd31c364ca454",
    "04863f6a587eff96782b1b45726f2160",
    "05f452d96922110cc8ebf110d37a3a8c",
]
