"""Where the blocks of a node that leaves go."""

from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_scheduling.directory.drain_plan import DrainCopy, DrainingBlock, DrainPlan

A, B = WorkerId("a"), WorkerId("b")


def block(name: str) -> BlockHash:
    return BlockHash(name.encode())


def leaving(*prompts: str) -> set[DrainingBlock]:
    """All blocks of these prompts; a block is named by its prompt's first letters."""
    return {
        DrainingBlock(block(p[:i]), block(p[: i - 1]) if i > 1 else None, i - 1)
        for p in prompts
        for i in range(1, len(p) + 1)
    }


def chain(prompt: str, start: int = 1) -> tuple[BlockHash, ...]:
    return tuple(block(prompt[:i]) for i in range(start, len(prompt) + 1))


def test_a_block_goes_where_the_one_before_it_is_else_where_most_room_is() -> None:
    plan = DrainPlan(leaving("ab", "xy"))
    plan.add_target(A, [block("a")], n_room=1)
    plan.add_target(B, [], n_room=5)
    order = plan.next(10)
    assert order == DrainCopy(B, chain("xy"), None)
    plan.on_copied(order, 2)
    assert plan.next(10) == DrainCopy(A, (block("ab"),), block("a"))


def test_who_refuses_or_takes_less_than_it_was_asked_for_is_asked_no_more() -> None:
    plan = DrainPlan(leaving("abcd"))
    plan.add_target(A, [], n_room=10)
    plan.add_target(B, [], n_room=2)
    order = plan.next(10)
    assert order is not None and order.target == A
    plan.on_copied(order, 1)
    assert plan.next(10) == DrainCopy(B, chain("abc", 2), block("a"))
    plan.exclude(B)
    assert plan.next(10) is None and set(plan.remaining) == set(chain("abcd", 2))


PROMPTS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=6)


@given(
    ours=PROMPTS,
    theirs=PROMPTS,
    rooms=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    most=st.integers(1, 4),
    shares=st.lists(st.floats(0, 1), min_size=40, max_size=40),
)
def test_every_block_ends_somewhere_unless_nobody_has_room(
    ours: list[str], theirs: list[str], rooms: list[int], most: int, shares: list[float]
) -> None:
    blocks = leaving(*ours)
    plan = DrainPlan(blocks)
    held: dict[WorkerId, set[BlockHash]] = {WorkerId(str(i)): set() for i in range(len(rooms))}
    held[WorkerId("0")] = {each.hash for each in leaving(*theirs)}
    room = {WorkerId(str(i)): n for i, n in enumerate(rooms)}
    for name, has in held.items():
        plan.add_target(name, has, room[name])
    all_taken = True
    for share in shares:
        if (order := plan.next(most)) is None:
            break
        assert 0 < len(order.hashes) <= min(most, room[order.target])
        assert not any(each in has for each in order.hashes for has in held.values())
        assert order.parent is None or block(order.hashes[0].decode()[:-1]) == order.parent
        assert all(a == b[:-1] for a, b in zip(order.hashes, order.hashes[1:], strict=False))
        n_taken = len(order.hashes) if share > 0.1 else int(share * 10 * len(order.hashes))
        all_taken = all_taken and n_taken == len(order.hashes)
        plan.on_copied(order, n_taken)
        held[order.target] |= set(order.hashes[:n_taken])
        room[order.target] -= n_taken
    else:
        return  # more orders than outcomes: nothing to say
    everywhere = {each for has in held.values() for each in has}
    assert set(plan.remaining) == {each.hash for each in blocks} - everywhere
    if all_taken:
        assert not plan.remaining or not any(room.values())
