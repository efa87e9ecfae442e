"""Which slots of vLLM's cache a pass writes, reads back and clears."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_engine.interface import Run
from halfmoon_engine_vllm.batch import PagedBatch, plan_batch

BLOCK = 4


def plan(runs: Sequence[Run]) -> PagedBatch:
    tokens = np.concatenate([np.asarray(run.token_ids, dtype=np.int64) for run in runs])
    return plan_batch(runs, tokens, np.array([], dtype=np.int64), BLOCK)


class Mirror:
    """The slots of one sequence's pages that hold numbers of its own, or zeros."""

    def __init__(self, pages: Sequence[int]) -> None:
        self.pages = pages
        self.clean: set[int] = set()
        self.n = 0

    def step(self, n_new: int, *, continues: bool) -> PagedBatch:
        run = Run([1] * n_new, self.n, self.pages, None, continues)
        batch = plan([run])
        if not continues:
            self.clean.clear()
        for page in batch.part_filled_pages.tolist():
            self.clean |= set(range(page * BLOCK, (page + 1) * BLOCK))
        self.clean |= {*batch.read_slots.tolist(), *batch.slots.tolist()}
        self.n += n_new
        return batch

    def readable(self) -> set[int]:
        used = self.pages[: -(-self.n // BLOCK)]
        return {page * BLOCK + place for page in used for place in range(BLOCK)}


@given(
    st.lists(st.tuples(st.integers(1, 11), st.booleans()), min_size=1, max_size=6),
    st.permutations(range(20)),
)
def test_attention_finds_nothing_of_former_owners_in_a_sequences_pages(
    steps: list[tuple[int, bool]], pages: list[int]
) -> None:
    mirror = Mirror(pages)
    for number, (n_new, continues) in enumerate(steps):
        mirror.step(n_new, continues=continues and number > 0)
        assert mirror.readable() <= mirror.clean


def test_a_step_that_goes_on_reads_nothing_back_and_clears_pages_at_their_first_slot_alone() -> (
    None
):
    mirror = Mirror([7, 3])
    cleared = [
        mirror.step(n_new, continues=number > 0).part_filled_pages.tolist()
        for number, n_new in enumerate((3, 1, 1, 1))
    ]
    assert cleared == [[7], [], [3], []]
    batch = mirror.step(1, continues=True)
    assert not len(batch.read_slots)


def test_pages_that_a_pass_fills_are_not_cleared_before() -> None:
    assert not len(plan([Run([1] * 2 * BLOCK, 0, [2, 5], None)]).part_filled_pages)


def test_a_sequence_from_elsewhere_is_read_back_up_to_its_new_tokens() -> None:
    batch = plan([Run([1], 5, [9, 2], None), Run([1, 1], 1, [4], None, continues=True)])
    assert batch.read_slots.tolist() == [36, 37, 38, 39, 8]
    assert batch.slots.tolist() == [9, 17, 18]
    assert batch.part_filled_pages.tolist() == [2]
