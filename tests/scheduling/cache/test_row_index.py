"""Rows of hashes: the table against a dict, and the queues against lists."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.cache.row_index import NO_ROW, RowIndex
from halfmoon_scheduling.cache.row_queues import RowQueues


class Crowded(bytes):
    """Hashes of few homes, so that rows push each other on."""

    def __hash__(self) -> int:
        return self[0] % 3


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=80))
def test_whatever_has_a_row_is_found_by_it_and_by_its_hash(steps: list[tuple[bool, int]]) -> None:
    index = RowIndex()
    rows: dict[BlockHash, int] = {}
    for coming, i in steps:
        block = BlockHash(Crowded([i]))
        if coming and block not in rows:
            rows[block] = index.add(block)
        elif not coming and block in rows:
            index.remove(rows.pop(block))
        index.check()
        assert len(index) == len(rows)
        assert {block: index.find(block) for block in rows} == rows
        assert all(index[row] == block for block, row in rows.items())
        others = {BlockHash(Crowded([i])) for i in range(12)} - rows.keys()
        assert all(index.find(block) == NO_ROW for block in others)


@given(
    here=st.sets(st.integers(0, 11)),
    gone=st.sets(st.integers(0, 11)),
    asked=st.lists(st.integers(0, 11)),
)
def test_a_run_of_hashes_is_found_up_to_the_first_without_a_row(
    here: set[int], gone: set[int], asked: list[int]
) -> None:
    index = RowIndex()
    for i in here:
        index.add(BlockHash(Crowded([i])))
    for i in here & gone:
        index.remove(index.find(BlockHash(Crowded([i]))))
    blocks = [BlockHash(Crowded([i])) for i in asked]
    known = [*takewhile(lambda block: index.find(block) != NO_ROW, blocks)]
    rows = index.find_run(blocks)
    assert rows == [index.find(block) for block in known]
    assert index.hashes(rows) == known


def test_rows_of_hashes_that_are_gone_are_given_again() -> None:
    index = RowIndex()
    for i in range(1000):
        row = index.add(BlockHash(i.to_bytes(16, "big")))
        assert row < 10
        if i >= 9:
            index.remove(index.find(BlockHash((i - 9).to_bytes(16, "big"))))


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["append", "remove", "move"]), st.integers(0, 9), st.integers(0, 2)
        )
    )
)
def test_queues_keep_their_order_wherever_a_row_leaves_them(
    steps: list[tuple[str, int, int]],
) -> None:
    queues: RowQueues[int] = RowQueues()
    model: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step, row, name in steps:
        here = next((n for n, rows in model.items() if row in rows), None)
        if step == "append" and here is None:
            queues.append(name, row)
            model[name].append(row)
        elif step == "remove" and here is not None:
            queues.remove(here, row)
            model[here].remove(row)
        elif step == "move" and model[name]:
            moved = model[name][row % len(model[name]) :: 2][::-1]
            queues.move_to_end(name, moved)
            model[name] = [each for each in model[name] if each not in moved] + moved
        for n, rows in model.items():
            assert list(queues.rows(n)) == rows
            assert (n in queues) == bool(rows)
