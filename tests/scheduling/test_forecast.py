"""Seconds and tokens here are chosen to be worked out by hand: a token takes a second."""

import pytest

from halfmoon_protocol.ids import RequestId
from halfmoon_scheduling.forecast import Change, Pace, Starts, Stay, expected_change, uniform_change
from halfmoon_scheduling.output_lengths import LengthSample


def sample(*lengths: int) -> LengthSample:
    made = LengthSample()
    for n in lengths:
        made.observe(n)
    return made


def starts(*entries: tuple[float, int]) -> Starts:
    made = Starts()
    for i, (start_s, n_tokens) in enumerate(entries):
        made.add(RequestId(f"r{i}"), start_s, n_tokens)
    return made


def stay(
    start_s: float, lengths: LengthSample, *, running: bool = False, n_tokens: int = 100
) -> Stay:
    return Stay(n_tokens, 10_000, lengths, start_s, running)


def test_starts_are_counted_between_two_moments_with_their_tokens() -> None:
    book = starts((5.0, 50), (1.0, 10), (3.0, 30))
    assert book.between(float("-inf"), 3.0) == (2, 40)
    assert book.between(1.0, 5.0) == (2, 80)
    assert book.between(5.0, 1.0) == (0, 0)
    book.remove(RequestId("r2"), 3.0)
    book.check()
    assert book.between(0.0, 9.0) == (2, 60)


def test_equal_starts_are_told_apart() -> None:
    book = starts((1.0, 10), (1.0, 20), (1.0, 30))
    book.remove(RequestId("r1"), 1.0)
    assert book.between(0.0, 1.0) == (2, 40)


def test_with_a_uniform_decode_time_those_that_began_long_ago_are_gone() -> None:
    # t_d is 10: by 20 those that began by 10 are over.
    running = starts((2.0, 100), (10.0, 200), (11.0, 400))
    assert uniform_change(running, starts(), 12.0, 20.0, 10.0) == Change(-2, -300)


def test_those_whose_prefill_is_planned_to_end_by_then_have_come() -> None:
    pending = starts((13.0, 1000), (20.0, 2000), (21.0, 4000))
    assert uniform_change(starts(), pending, 12.0, 20.0, 10.0) == Change(2, 3000)


def test_a_prefill_that_should_be_over_is_taken_to_end_now() -> None:
    pending = starts((1.0, 1000))  # its decode would be over by 11
    assert uniform_change(starts(), pending, 12.0, 20.0, 10.0) == Change(1, 1000)


def test_far_ahead_some_will_have_come_and_gone() -> None:
    pending = starts((13.0, 1000), (30.0, 2000))
    assert uniform_change(starts(), pending, 12.0, 35.0, 10.0) == Change(1, 2000)


def test_an_unknown_decode_time_lets_nobody_go() -> None:
    assert uniform_change(starts((0.0, 100)), starts(), 1e6, 2e6, float("inf")) == Change(0, 0)


def test_a_running_request_goes_as_soon_as_answers_of_its_kind_do() -> None:
    # It has 10 tokens; of answers over 10, half end by 20.
    lengths = sample(5, 15, 20, 30, 40)
    change = expected_change([stay(0.0, lengths, running=True)], 10.0, 20.0, 1.0)
    assert change.n_requests == pytest.approx(-0.5)
    # half of it grows by 10 tokens, half of it takes 110 away
    assert change.context_tokens == pytest.approx(0.5 * 10 - 0.5 * 110)


def test_an_answer_longer_than_any_seen_goes_on() -> None:
    lengths = sample(5, 6, 7)
    change = expected_change([stay(0.0, lengths, running=True)], 50.0, 60.0, 1.0)
    assert change == Change(0.0, 10.0)


def test_nothing_outlives_the_tokens_that_were_asked_for() -> None:
    long = Stay(100, 20, sample(1000), 0.0, running=True)
    assert expected_change([long], 10.0, 25.0, 1.0).n_requests == -1.0


def test_a_planned_request_comes_and_may_be_gone_again() -> None:
    lengths = sample(5, 15)
    planned = stay(12.0, lengths)
    assert expected_change([planned], 10.0, 11.0, 1.0) == Change(0.0, 0.0)
    assert expected_change([planned], 10.0, 14.0, 1.0) == Change(1.0, 102.0, 1)
    assert expected_change([planned], 10.0, 20.0, 1.0).n_requests == 0.5
    assert expected_change([planned], 10.0, 30.0, 1.0).n_requests == 0.0


def test_a_planned_request_that_is_late_starts_now() -> None:
    assert expected_change([stay(1.0, sample(15))], 10.0, 14.0, 1.0) == Change(1.0, 104.0, 1)


def test_what_has_not_arrived_is_expected_at_the_pace_of_late_less_what_is_planned() -> None:
    pace = Pace()
    for i in range(41):  # two a second, of 50 tokens; the first one is long ago
        pace.started(i * 0.5, 50)
    # 20 s ahead, 4 workers: 10 each, of which 4 are planned; answers are longer than 10 tokens.
    change = pace.unplanned_change(4, 4, 20.0, 40.0, 1.0, sample(30))
    assert change.n_requests == pytest.approx(6)
    assert change.context_tokens == pytest.approx(300)
    # half of the answers are over by then: they start half way there
    half = pace.unplanned_change(4, 4, 20.0, 40.0, 1.0, sample(5, 30))
    assert half.n_requests == pytest.approx(3)
    assert pace.unplanned_change(99, 4, 20.0, 40.0, 1.0, sample(30)) == Change(0.0, 0.0)


def test_a_pace_of_long_ago_is_none() -> None:
    pace = Pace()
    assert pace.unplanned_change(0, 1, 0.0, 9.0, 1.0, sample(30)) == Change(0.0, 0.0)
    pace.started(0.0, 50)
    assert pace.unplanned_change(0, 1, 1.0, 11.0, 1.0, sample(30)).n_requests == 0.5
    assert pace.unplanned_change(0, 1, 100.0, 200.0, 1.0, sample(30)) == Change(0.0, 0.0)
