"""Seconds and tokens here are chosen to be worked out by hand."""

from random import Random

from halfmoon_protocol.ids import RequestId
from halfmoon_scheduling.prediction.decode_forecast import (
    DecodeStarts,
    LoadChange,
    uniform_load_change,
)


def starts(*entries: tuple[float, int]) -> DecodeStarts:
    made = DecodeStarts()
    for i, (start_s, n_tokens) in enumerate(entries):
        made.add(RequestId(f"r{i}"), start_s, n_tokens)
    return made


def test_starts_are_counted_up_to_a_moment_with_their_tokens() -> None:
    book = starts((5.0, 50), (1.0, 10), (3.0, 30))
    assert book.until(0.9) == (0, 0)
    assert book.until(3.0) == (2, 40)
    assert book.until(float("inf")) == (3, 90)
    assert book.until(float("-inf")) == (0, 0)
    book.remove(RequestId("r2"), 3.0)
    book.check()
    assert book.until(9.0) == (2, 60)


def test_equal_starts_are_told_apart() -> None:
    book = starts(*[(1.0, 10)] * 300, (1.0, 20), *[(1.0, 10)] * 300)
    book.remove(RequestId("r300"), 1.0)
    book.check()
    assert book.until(1.0) == (600, 6000)


def test_thousands_come_and_go_in_any_order_and_the_counts_stay_true() -> None:
    seed = 5
    print(f"seed {seed}")
    dice, book = Random(seed), DecodeStarts()
    here: dict[RequestId, tuple[float, int]] = {}
    for i in range(4000):
        if i < 1500 or dice.random() < 0.4:
            request_id, entry = RequestId(f"r{i}"), (float(dice.randrange(500)), dice.randrange(99))
            here[request_id] = entry
            book.add(request_id, *entry)
        elif here:
            request_id = dice.choice(list(here))
            book.remove(request_id, here.pop(request_id)[0])
        if i % 100 == 0:
            book.check()
            at_s = float(dice.randrange(500))
            before = [n_tokens for start_s, n_tokens in here.values() if start_s <= at_s]
            assert book.until(at_s) == (len(before), sum(before))
            assert len(book) == len(here)
    for request_id, (start_s, _) in here.items():
        book.remove(request_id, start_s)
    book.check()
    assert book.until(1e9) == (0, 0)


def test_with_a_uniform_decode_time_those_that_began_long_ago_are_gone() -> None:
    # t_d is 10: by 20 those that began by 10 are over.
    running = starts((2.0, 100), (10.0, 200), (11.0, 400))
    assert uniform_load_change(running, starts(), 12.0, 20.0, 10.0) == LoadChange(-2, -300)


def test_those_whose_prefill_is_planned_to_end_by_then_have_come() -> None:
    pending = starts((13.0, 1000), (20.0, 2000), (21.0, 4000))
    assert uniform_load_change(starts(), pending, 12.0, 20.0, 10.0) == LoadChange(2, 3000)


def test_a_prefill_that_should_be_over_is_taken_to_end_now() -> None:
    pending = starts((1.0, 1000))  # its decode would be over by 11
    assert uniform_load_change(starts(), pending, 12.0, 20.0, 10.0) == LoadChange(1, 1000)


def test_far_ahead_some_will_have_come_and_gone() -> None:
    pending = starts((13.0, 1000), (30.0, 2000))
    assert uniform_load_change(starts(), pending, 12.0, 35.0, 10.0) == LoadChange(1, 2000)


def test_an_unknown_decode_time_lets_nobody_go() -> None:
    assert uniform_load_change(starts((0.0, 100)), starts(), 1e6, 2e6, float("inf")) == LoadChange(
        0, 0
    )
