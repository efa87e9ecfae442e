"""Seconds and tokens here are chosen to be worked out by hand."""

from random import Random

import pytest

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


def test_thousands_come_and_go_in_any_order_and_the_counts_stay_true() -> None:
    seed = 5
    print(f"seed {seed}")
    dice, book = Random(seed), DecodeStarts()
    here: dict[RequestId, tuple[float, int]] = {}
    for i in range(4000):
        if i < 1500 or dice.random() < 0.4:
            request_id, entry = RequestId(f"r{i}"), (float(dice.randrange(50)), dice.randrange(99))
            here[request_id] = entry
            book.add(request_id, *entry)
        elif here:
            request_id = dice.choice(list(here))
            book.remove(request_id, here.pop(request_id)[0])
        if i % 100 == 0:
            book.check()
            at_s = float(dice.randrange(50))
            before = [n_tokens for start_s, n_tokens in here.values() if start_s <= at_s]
            assert book.until(at_s) == (len(before), sum(before))
            assert len(book) == len(here)
    for request_id, (start_s, _) in here.items():
        book.remove(request_id, start_s)
    book.check()
    assert book.until(1e9) == (0, 0)


Entries = tuple[tuple[float, int], ...]
#: What runs, what is planned to be prefilled, the moment asked for, and the change from 12 s to it,
#: where a decode takes 10 s.
CHANGES: dict[str, tuple[Entries, Entries, float, tuple[int, int]]] = {
    "what began long ago is gone": (((2.0, 100), (10.0, 200), (11.0, 400)), (), 20.0, (-2, -300)),
    "what is prefilled by then has come": (
        (),
        ((13.0, 1000), (20.0, 2000), (21.0, 4000)),
        20.0,
        (2, 3000),
    ),
    "a prefill that should be over ends now": ((), ((1.0, 1000),), 20.0, (1, 1000)),
    "far ahead some have come and gone": ((), ((13.0, 1000), (30.0, 2000)), 35.0, (1, 2000)),
}


@pytest.mark.parametrize(("running", "pending", "at_s", "change"), CHANGES.values(), ids=CHANGES)
def test_with_a_uniform_decode_time(
    running: Entries, pending: Entries, at_s: float, change: tuple[int, int]
) -> None:
    found = uniform_load_change(starts(*running), starts(*pending), 12.0, at_s, 10.0)
    assert found == LoadChange(*change)


def test_an_unknown_decode_time_lets_nobody_go() -> None:
    change = uniform_load_change(starts((0.0, 100)), starts(), 1e6, 2e6, float("inf"))
    assert change == LoadChange(0, 0)
