from dataclasses import dataclass, field
from typing import Any

import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.admission.admission_policy import (
    ADMITTED,
    MIN_RETRY_S,
    AdmissionCase,
    AdmissionVerdict,
    decide_after_prefill,
    decide_on_arrival,
)
from halfmoon_scheduling.placement.estimates import Estimate, Placement

D0 = WorkerId("decode-0")


def placement(queue_s: float, prefill_s: float, decode: WorkerId | None = D0) -> Placement:
    numbers = queue_s, 0.0, prefill_s, queue_s + prefill_s
    row = Estimate(WorkerId("prefill-0"), None, 0, None, 0, 0, *numbers)
    return Placement(row, decode, 0.05, (row,))


@dataclass
class Answers:
    """An outlook that says what it is told to, and remembers what it was asked."""

    running: float = 0.0
    mean: float = 0.0
    uniform: float = 0.0
    asked: list[tuple[str, float]] = field(default_factory=list)

    def running_tbt_s(self, decode: WorkerId, n_tokens: int) -> float:
        return self.running

    def mean_tbt_s(self, n_tokens: int) -> float:
        return self.mean

    def uniform_tbt_s(self, n_tokens: int, at_s: float, now: float) -> float:
        self.asked.append(("uniform", at_s))
        return self.uniform


def verdict(
    mode: str,
    placed: Placement,
    outlook: Answers | None = None,
    *,
    ttft: float | None = None,
    tbt: float | None = None,
    waited_s: float = 0.0,
    now: float = 0.0,
) -> AdmissionVerdict:
    applicant = AdmissionCase(placed, 100, ttft, tbt, now, waited_s)
    return decide_on_arrival(mode, applicant, outlook or Answers())


LOOKING: list[Any] = ["baseline", "early", "predicted", "lookahead"]


def test_with_mode_none_everybody_is_let_in() -> None:
    busy = Answers(9, 9, 9)
    assert verdict("none", placement(100, 100), busy, ttft=1, tbt=0.1) == ADMITTED
    assert AdmissionVerdict(0.0, 0.0, "", "", 0.0) == ADMITTED


def test_loads_are_predicted_times_over_their_limits_and_0_without_one() -> None:
    both = verdict("early", placement(2, 3), Answers(mean=0.05), ttft=10, tbt=0.1)
    assert (both.prefill_load, both.decode_load) == (0.5, 0.5)
    neither = verdict("early", placement(2, 3), Answers(mean=0.05))
    assert (neither.prefill_load, neither.decode_load) == (0.0, 0.0)


@pytest.mark.parametrize("mode", LOOKING)
def test_what_keeps_its_limits_is_let_in_and_the_limit_itself_is_kept(mode: str) -> None:
    at_the_limit = Answers(0.05, 0.05, 0.05)
    assert not verdict(mode, placement(2, 3), at_the_limit, ttft=5, tbt=0.05).misses
    assert not verdict(mode, placement(100, 100), Answers(9, 9, 9)).misses


@pytest.mark.parametrize("mode", LOOKING)
def test_a_late_first_token_is_refused_until_the_queue_is_short_enough(mode: str) -> None:
    refused = verdict(mode, placement(10, 3), ttft=8)
    assert refused.misses == "ttft"
    assert refused.prefill_load == pytest.approx(13 / 8)
    assert refused.retry_after_s == pytest.approx(5)
    assert "13 s at prefill-0 (queue 10 s), the limit is 8 s" in refused.reason
    # If an empty queue would not help, the whole queue is waited for, and a second at the least.
    assert verdict(mode, placement(10, 30), ttft=8).retry_after_s == 10
    assert verdict(mode, placement(0.5, 1), ttft=1.2).retry_after_s == MIN_RETRY_S
    # Time spent waiting counts.
    assert not verdict(mode, placement(2, 3), ttft=6, waited_s=0.5).misses
    assert verdict(mode, placement(2, 3), ttft=6, waited_s=1.5).misses == "ttft"


@pytest.mark.parametrize(
    ("mode", "load"), [("early", "mean"), ("predicted", "uniform"), ("lookahead", "uniform")]
)
def test_slow_tokens_are_refused_by_the_load_that_the_mode_looks_at(mode: str, load: str) -> None:
    refused = verdict(mode, placement(0, 1), Answers(**{load: 0.2}), tbt=0.1)  # type: ignore[arg-type]
    assert refused.misses == "tbt"
    assert refused.decode_load == pytest.approx(2)
    assert "0.2 s at decode-0, the limit is 0.1 s" in refused.reason
    assert refused.retry_after_s >= 1
    others = Answers(**{"running": 0.2, "mean": 0.2, "uniform": 0.2, load: 0.05})  # type: ignore[arg-type]
    assert not verdict(mode, placement(0, 1), others, tbt=0.1).misses


def test_baseline_looks_at_decode_only_when_the_prefill_is_done() -> None:
    busy = Answers(running=0.2, mean=0.2, uniform=0.2)
    assert not verdict("baseline", placement(0, 1), busy, ttft=5, tbt=0.1).misses
    assert decide_after_prefill(D0, 100, 0.1, busy).misses == "tbt"
    assert not decide_after_prefill(D0, 100, 0.2, busy).misses
    assert not decide_after_prefill(D0, 100, None, busy).misses


@pytest.mark.parametrize("mode", ["predicted", "lookahead"])
def test_a_forecast_is_of_the_end_of_the_prefill(mode: str) -> None:
    outlook = Answers()
    verdict(mode, placement(2, 3), outlook, tbt=0.1, now=100.0)
    assert outlook.asked == [("uniform", 105.0)]


def test_without_a_decode_worker_that_has_room_only_the_first_token_counts() -> None:
    assert not verdict("early", placement(0, 1, decode=None), Answers(9, 9, 9), tbt=0.1).misses
