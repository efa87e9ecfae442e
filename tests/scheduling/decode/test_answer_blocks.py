"""Blocks of an answer continue the prompt's chain, and come once their KV is computed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.blocks import block_hashes, root_hash
from halfmoon_scheduling.decode.answer_blocks import AnswerBlocks

SIZE = 16
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5 * SIZE)


def chain_of(prompt: list[int], first: int, salt: str = "") -> AnswerBlocks:
    hashes = block_hashes(prompt, model="m", salt=salt, block_size=SIZE)
    root = root_hash(model="m", salt=salt, block_size=SIZE)
    return AnswerBlocks(
        hashes[-1] if hashes else root,
        prompt[len(hashes) * SIZE :],
        first,
        n_landed=len(prompt),
        block_size=SIZE,
    )


@given(prompt=TOKENS, answer=TOKENS, salt=st.sampled_from(["", "lab"]))
def test_they_are_the_blocks_of_prompt_and_answer_behind_the_prompts_own(
    prompt: list[int], answer: list[int], salt: str
) -> None:
    first, *others = answer
    blocks = chain_of(prompt, first, salt)
    found = [block for token in others if (block := blocks.on_token(token)) is not None]
    # The newest token has no KV yet.
    all_hashes = block_hashes([*prompt, *answer][:-1], model="m", salt=salt, block_size=SIZE)
    n_before = len(prompt) // SIZE
    assert [block.hash for block in found] == all_hashes[n_before:]
    assert [block.index for block in found] == [*range(n_before, len(all_hashes))]
    for block in found:
        assert block.parent == (all_hashes[block.index - 1] if block.index else None)
        start = block.index * SIZE
        assert block.token_ids == tuple([*prompt, *answer][start : start + SIZE])


def test_a_block_comes_with_the_token_behind_its_last_one() -> None:
    blocks = chain_of(list(range(SIZE)), 1)
    came = [blocks.on_token(token) is not None for token in range(2 * SIZE)]
    assert [i for i, block in enumerate(came) if block] == [SIZE - 1, 2 * SIZE - 1]


def test_a_tail_of_another_length_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="3 tokens, a prompt of 20 tokens has 4"):
        AnswerBlocks(b"", (1, 2, 3), 1, n_landed=20, block_size=SIZE)  # type: ignore[arg-type]
