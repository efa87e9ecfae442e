"""The translator names a server's blocks as the conductor names those of the same prompt."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.errors import ProtocolError
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from halfmoon_servers.kv_events.block_translator import MAX_PLACES, BlockTranslator
from halfmoon_servers.kv_events.server_events import (
    ServerBlockRemoved,
    ServerBlockStored,
    ServerCacheCleared,
    ServerEvent,
)
from halfmoon_servers.kv_events.server_salts import ServerSalts

SIZE = 16
PROMPT = tuple(range(100, 100 + 4 * SIZE))


def ours(prompt: Sequence[int], salt: str = "") -> list[BlockHash]:
    return block_hashes(prompt, model="m", salt=salt, block_size=SIZE)


def translator(max_blocks: int = 1000) -> BlockTranslator:
    return BlockTranslator("m", SIZE, ServerSalts(), max_blocks)


@pytest.fixture
def ours_of() -> BlockTranslator:
    return translator()


def stored(
    hashes: Sequence[int], tokens: Sequence[int], parent: int | None = None, **fields: Any
) -> ServerBlockStored:
    given = {"parent_block_hash": parent, "block_size": SIZE, **fields}
    return ServerBlockStored(block_hashes=tuple(hashes), token_ids=tuple(tokens), **given)


def removed(hashes: Sequence[int], **fields: Any) -> ServerBlockRemoved:
    return ServerBlockRemoved(block_hashes=tuple(hashes), **fields)


def test_the_salt_of_the_first_block_is_the_salt_of_the_prompt(ours_of: BlockTranslator) -> None:
    ours_of.translate([stored([1, 2], PROMPT[: 2 * SIZE], extra_keys=(("lab\x1f7",), None))])
    ours_of.translate([stored([3], PROMPT[2 * SIZE : 3 * SIZE], parent=2)])
    assert list(ours_of.held()) == ours(PROMPT[: 3 * SIZE], salt="lab\x1f7")


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129, "halfmoon-sha256:1"])
def test_a_salt_that_servers_refuse_travels_under_another_name(salt: str) -> None:
    salts = ServerSalts()
    ours_of = BlockTranslator("m", SIZE, salts)
    sent = salts.server_salt(salt)
    assert len(sent) <= 128 and not set("@/\\\0") & set(sent) and sent != salt
    ours_of.translate([stored([1], PROMPT[:SIZE], extra_keys=((sent,),))])
    assert list(ours_of.held()) == ours(PROMPT[:SIZE], salt=salt)


def test_a_salt_that_servers_take_is_sent_as_it_is_and_survives_a_restart_of_the_router() -> None:
    assert ServerSalts().server_salt("lab\x1f") == "lab\x1f"
    assert ServerSalts().server_salt("") == ""
    assert ServerSalts().our_salt("lab\x1f") == "lab\x1f"


def test_remembered_salts_are_bounded() -> None:
    salts = ServerSalts(max_salts=2)
    first, *_, last = (salts.server_salt(f"{index}@") for index in range(3))
    assert (salts.our_salt(first), salts.our_salt(last)) == (first, "2@")


def test_an_event_without_tokens_moves_known_blocks_alone(ours_of: BlockTranslator) -> None:
    ours_of.translate([stored([1], PROMPT[:SIZE]), removed([1])])
    (back,) = ours_of.translate([stored([1, 9], (), block_size=0, medium="STORAGE")])
    assert isinstance(back, BlockStored) and list(back.block_hashes) == ours(PROMPT[:SIZE])
    assert ours_of.counts.unknown_parent == 1


@pytest.mark.parametrize("fields", [{"lora_id": 1}, {"lora_name": "french"}])
def test_blocks_of_adapters_are_skipped(ours_of: BlockTranslator, fields: dict[str, Any]) -> None:
    assert ours_of.translate([stored([1], PROMPT[:SIZE], **fields)]) == ()
    assert ours_of.counts.adapter == 1


def test_a_chain_ends_before_its_first_image(ours_of: BlockTranslator) -> None:
    keys = (("salt",), None, (("image", 3),), None)
    ours_of.translate([stored([1, 2, 3, 4], PROMPT, extra_keys=keys)])
    assert list(ours_of.held()) == ours(PROMPT[: 2 * SIZE], salt="salt")
    assert ours_of.counts.multimodal == 2
    assert ours_of.translate([stored([5], PROMPT[:SIZE], parent=4)]) == ()


@pytest.mark.parametrize(
    "keys", [(("image", 0),), ("salt", ("image", 0)), (b"digest",), ("a", "b")]
)
def test_a_first_block_of_an_image_or_embeddings_is_no_salted_block(
    ours_of: BlockTranslator, keys: tuple[Any, ...]
) -> None:
    assert ours_of.translate([stored([1], PROMPT[:SIZE], extra_keys=(keys,))]) == ()


def test_a_later_block_has_no_salt(ours_of: BlockTranslator) -> None:
    ours_of.translate([stored([1], PROMPT[:SIZE])])
    later = stored([2], PROMPT[SIZE : 2 * SIZE], parent=1, extra_keys=(("salt",),))
    assert ours_of.translate([later]) == ()


def test_layers_of_a_window_are_told_by_kind_or_gaps(ours_of: BlockTranslator) -> None:
    windowed = stored([1], PROMPT[:SIZE], group_idx=0, kv_cache_spec_kind="sliding_window")
    assert ours_of.translate([windowed]) == ()
    assert ours_of.translate([stored([2], PROMPT, group_idx=1)]) == ()  # 4 blocks, 3 left out
    assert ours_of.translate([stored([3], PROMPT[:SIZE], group_idx=1)]) == ()
    assert ours_of.counts.other_layers == 3
    assert len(ours_of.translate([stored([1], PROMPT[:SIZE], group_idx=2)])) == 1


def test_blocks_of_another_size_are_skipped_and_counted(ours_of: BlockTranslator) -> None:
    assert ours_of.translate([stored([1], PROMPT[:32], block_size=32)]) == ()
    assert ours_of.translate([stored([1, 2], PROMPT[:SIZE])]) == ()
    assert (ours_of.counts.wrong_block_size, ours_of.counts.inconsistent) == (1, 2)


def test_a_block_size_that_halfmoon_does_not_allow_is_refused() -> None:
    with pytest.raises(ProtocolError, match="block_size is 1, allowed are 16 to 512"):
        BlockTranslator("m", 1, ServerSalts())


def test_blocks_over_the_bound_are_forgotten_oldest_first_and_reported_as_removed() -> None:
    ours_of = translator(max_blocks=2)
    changes = ours_of.translate([stored([1, 2], PROMPT[: 2 * SIZE]), stored([9], PROMPT[:SIZE])])
    first, _ = ours(PROMPT[: 2 * SIZE])
    assert BlockRemoved(block_hashes=(first,)) in changes
    assert ours_of.counts.forgotten == 1
    ours_of.check()


def test_removed_blocks_are_forgotten_before_any_that_is_held() -> None:
    ours_of = translator(max_blocks=2)
    ours_of.translate([stored([1], PROMPT[:SIZE])])
    for index in range(9):
        ours_of.translate([stored([10 + index], PROMPT[index : index + SIZE])])
        ours_of.translate([removed([10 + index])])
    assert list(ours_of.held()) == ours(PROMPT[:SIZE])
    assert ours_of.counts.forgotten == 0
    ours_of.check()


def test_a_server_that_names_ever_more_media_is_bounded(ours_of: BlockTranslator) -> None:
    for index in range(2 * MAX_PLACES):
        ours_of.translate([stored([1], PROMPT[:SIZE], medium=f"tape-{index}")])
        ours_of.translate([removed([1], medium=f"tape-{index}")])
    ours_of.check()


def _follow(held: set[BlockHash], changes: Sequence[KvEvent]) -> None:
    for change in changes:
        match change:
            case BlockStored(block_hashes=hashes):
                held |= {BlockHash(each) for each in hashes if isinstance(each, bytes)}
            case BlockRemoved(block_hashes=hashes):
                held -= {BlockHash(each) for each in hashes if isinstance(each, bytes)}
            case AllBlocksCleared():
                held.clear()


_TREE = {  # a server's hash: its prompt, up to this block
    10 * root + depth: tuple(1000 * root + token for token in range(depth * SIZE))
    for root in range(3)
    for depth in range(1, 5)
}
_media = st.sampled_from(["GPU", "CPU"])
_stored = st.builds(
    lambda root, start, n, medium: stored(
        [10 * root + depth for depth in range(start + 1, min(start + n, 4) + 1)],
        _TREE[10 * root + min(start + n, 4)][start * SIZE :],
        parent=10 * root + start if start else None,
        medium=medium,
    ),
    *(st.integers(0, 2), st.integers(0, 3), st.integers(1, 4), _media),
)
_removed = st.builds(
    lambda hashes, medium: removed(hashes, medium=medium),
    st.lists(st.sampled_from(sorted(_TREE)), max_size=4),
    _media,
)
_events = st.lists(st.one_of(_stored, _stored, _removed, st.just(ServerCacheCleared())))


@given(_events, st.integers(1, 12))
@settings(max_examples=300)
def test_changes_in_any_order_give_what_is_held(events: list[ServerEvent], max_blocks: int) -> None:
    ours_of = translator(max_blocks)
    roomy = translator(1000)
    model: set[tuple[int, str]] = set()  # what the server itself holds, with known parents
    known: set[int] = set()
    reported: set[BlockHash] = set()
    for event in events:
        _follow(reported, ours_of.translate([event]))
        assert reported == set(ours_of.held())
        ours_of.check()
        roomy.translate([event])
        match event:
            case ServerBlockStored(block_hashes=hashes, parent_block_hash=parent, medium=medium):
                if parent is None or parent in known:
                    known |= {each for each in hashes if isinstance(each, int)}
                    model |= {(each, str(medium)) for each in hashes if isinstance(each, int)}
            case ServerBlockRemoved(block_hashes=hashes, medium=medium):
                model -= {(each, str(medium)) for each in hashes if isinstance(each, int)}
            case ServerCacheCleared():
                model.clear()
                known.clear()
        assert set(roomy.held()) == {ours(_TREE[named])[-1] for named, _ in model}
