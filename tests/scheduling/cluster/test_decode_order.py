"""The order of decode workers chooses as the comparison of all. Numbers are small: many tie."""

from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_scheduling.cluster.decode_order import DecodeOrder
from halfmoon_scheduling.placement.decode_choice import choose_decode
from halfmoon_scheduling.placement.estimates import DecodeCandidate, PlacementRequest

candidates = st.builds(
    DecodeCandidate,
    st.integers(0, 7).map(lambda i: WorkerId(f"decode-{i}")),
    st.integers(0, 1),
    st.sampled_from((-1, 4, 8)),
    st.integers(1, 3).map(float),
    st.sampled_from((0.0, 1.0, 0.5)),
)


@given(
    changes=st.lists(st.one_of(candidates, st.integers(0, 7)), max_size=40),
    n_pages=st.integers(1, 9),
    n_tokens=st.integers(0, 3),
    refusing=st.sets(st.integers(0, 7), max_size=3),
    holder=st.none() | st.integers(0, 8),
)
def test_the_choice_is_that_of_comparing_all_workers(
    changes: list[DecodeCandidate | int],
    n_pages: int,
    n_tokens: int,
    refusing: set[int],
    holder: int | None,
) -> None:
    order, present = DecodeOrder(), dict[WorkerId, DecodeCandidate]()
    for change in changes:
        if isinstance(change, int):
            order.discard(WorkerId(f"decode-{change}"))
            present.pop(WorkerId(f"decode-{change}"), None)
        else:
            order.put(change)
            present[change.worker_id] = change
    order.check(present, besides=set())
    left_out = {WorkerId(f"decode-{i}") for i in refusing}
    pages_at = None if holder is None else WorkerId(f"decode-{holder}")
    job = PlacementRequest(
        RequestId("cmpl-1"), n_tokens, n_pages, block_size=1, block_bytes=1, pages_at=pages_at
    )
    expected = choose_decode(job, [c for w, c in present.items() if w not in left_out])
    assert order.choose(n_pages, n_tokens, lambda w: w not in left_out, pages_at) == expected


def test_of_equal_times_the_lower_name_is_chosen_though_it_is_visited_later() -> None:
    order = DecodeOrder()
    order.put(DecodeCandidate(WorkerId("decode-1"), 0, 8, 1.0, 1.0))
    order.put(DecodeCandidate(WorkerId("decode-0"), 0, 8, 2.0, 0.0))
    assert order.choose(1, 1, lambda worker: True) == (WorkerId("decode-0"), 2.0)
