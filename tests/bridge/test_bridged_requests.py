"""The books of one server's requests: room, counts, ends."""

from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import RequestId
from halfmoon_servers.bridge.bridged_requests import BridgedPhase, BridgedRequests

R1, R2 = RequestId("r1"), RequestId("r2")


def test_a_prompt_claims_its_pages_until_the_server_counts_it() -> None:
    books = BridgedRequests(n_blocks=10, block_size=16)
    request = books.add(R1, 33, expires_s=10.0)
    assert (request.n_pages, books.free_pages) == (3, 7)
    # The server shares most of it with others: it uses one page.
    request.phase = BridgedPhase.PREFILLING
    books.on_token(request, (5, None, ""), 1.0)
    books.on_load(0.1)
    assert books.free_pages == 9
    books.remove(R1)
    books.on_load(0.0)
    assert books.free_pages == 10 and books.idle.is_set()


def test_a_request_alone_gets_its_turn_whatever_the_last_count_was() -> None:
    books = BridgedRequests(n_blocks=10, block_size=16)
    books.on_load(1.0)
    assert books.refusal(100, 5, 1000) is None
    books.add(R1, 100, 10.0)
    refusal = books.refusal(100, 5, 1000)
    assert refusal is not None and refusal.retryable
    assert refusal.reason == "7 pages wanted, 0 of 10 free"


def test_what_never_fits_is_refused_for_good() -> None:
    books = BridgedRequests(n_blocks=10, block_size=16)
    for n_tokens, n_new, words in (
        (990, 11, "its context is 1000"),
        (170, 1, "need 11 pages; it has 10"),
    ):
        refusal = books.refusal(n_tokens, n_new, 1000)
        assert refusal is not None and not refusal.retryable and words in refusal.reason


def test_reservations_expire_and_requests_that_run_do_not() -> None:
    books = BridgedRequests(10, 16)
    books.add(R1, 20, expires_s=5.0)
    books.add(R2, 20, expires_s=5.0).phase = BridgedPhase.PREFILLING
    assert [request.request_id for request in books.expired(5.0)] == [R1]
    assert books.queued_tokens == 20


WHAT = st.sampled_from(["add", "remove", "token", "load"])


@given(st.lists(st.tuples(WHAT, st.integers(0, 5))))
def test_counts_stay_within_bounds_and_end_at_nothing(steps: list[tuple[str, int]]) -> None:
    books = BridgedRequests(20, 16)
    for what, i in steps:
        request_id = RequestId(f"r{i}")
        request = books.get(request_id)
        match what:
            case "add" if request is None:
                books.add(request_id, 16 * (i + 1), 1.0)
            case "remove":
                books.remove(request_id)
            case "token" if request is not None:
                request.phase = BridgedPhase.DECODING
                books.on_token(request, (7, None, ""), 1.0)
            case "load":
                books.on_load(i / 5)
        books.check()
        assert 0 <= books.free_pages <= 20
    for request in books.all():
        books.remove(request.request_id)
    books.on_load(0.0)
    assert books.free_pages == 20 and not len(books)
