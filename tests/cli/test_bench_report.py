"""Results of `halfmoon bench`: times, limits and summaries, and the sending on time."""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_cli.bench import run_summary
from halfmoon_cli.bench.bench_record import BenchRecord, Slo
from halfmoon_cli.bench.bench_report import result_warnings
from halfmoon_cli.bench.load_generator import LoadGenerator, RunProgress
from halfmoon_cli.bench.load_plan import PlannedRequest, PromptPart, RequestChain
from halfmoon_cli.bench.run_summary import BenchSummary


def summarize_run(
    records: list[BenchRecord], slo: Slo, *, loop_lags_s: list[float] | None = None, n_held: int = 0
) -> BenchSummary:
    progress = RunProgress(
        len(records), records=records, loop_lags_s=loop_lags_s or [], n_held=n_held
    )
    return run_summary.summarize_run(progress, slo)


def answered(
    index: int = 0, *, at_s: float = 0.0, tokens_s: tuple[float, ...] = (0.5, 0.6, 0.7)
) -> BenchRecord:
    """A finished request whose tokens came so many seconds after it was to be sent."""
    record = BenchRecord(index, at_s, 100, len(tokens_s), sent_s=at_s)
    for moment_s in tokens_s:
        record.on_token(at_s + moment_s)
    record.finish(at_s + tokens_s[-1], "finished")
    record.n_prompt, record.n_cached = 100, 40
    return record


def lost(index: int, outcome: str, reason: str, at_s: float = 0.0) -> BenchRecord:
    record = BenchRecord(index, at_s, 100, 3, sent_s=at_s)
    record.finish(at_s + 0.1, "refused" if outcome == "refused" else "failed", reason)
    return record


def test_times_count_from_when_it_was_to_be_sent() -> None:
    record = answered(at_s=10.0)
    record.sent_s = 10.4
    assert record.ttft_s == pytest.approx(0.5)
    assert record.e2e_s == pytest.approx(0.7)
    assert record.lag_s == pytest.approx(0.4)
    assert record.tbt_s == pytest.approx(0.1)


def test_tokens_that_come_together_count_each_for_the_mean_and_once_as_a_gap() -> None:
    record = answered(tokens_s=(1.0, 1.4, 1.8))
    # The endpoint says that these three events held five tokens.
    record.n_out = 5
    assert record.tbt_s == pytest.approx(0.2)
    assert record.tbt_by("max") == pytest.approx(0.4)
    assert summarize_run([record], Slo()).bundled == pytest.approx(0.4)


def test_a_request_of_one_token_has_no_tbt_and_is_good_by_its_ttft() -> None:
    record = answered(tokens_s=(0.5,))
    assert record.tbt_s is record.tbt_tail_s is record.tbt_by("max") is None
    assert Slo(ttft_s=1.0, tbt_s=0.001).missed(record) == []


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60))
def test_the_tail_is_the_mean_of_the_longest_tenth(gaps: list[float]) -> None:
    record = BenchRecord(0, 0.0, 1, 1, gaps_s=array("d", gaps))
    tail_s = record.tbt_tail_s
    assert tail_s is not None
    n = max(1, len(gaps) // 10)
    assert tail_s == pytest.approx(sum(sorted(gaps, reverse=True)[:n]) / n)


@pytest.mark.parametrize(
    ("slo", "missed"),
    [
        (Slo(), []),
        (Slo(ttft_s=0.5, tbt_s=0.11), []),
        (Slo(ttft_s=0.4), ["ttft"]),
        (Slo(tbt_s=0.09), ["tbt"]),
        (Slo(ttft_s=0.4, tbt_s=0.09), ["ttft", "tbt"]),
        (Slo(tbt_s=0.11, tbt_by="max"), ["tbt"]),
        (Slo(tbt_s=0.11, tbt_by="tail"), ["tbt"]),
    ],
)
def test_a_request_is_good_within_both_limits(slo: Slo, missed: list[str]) -> None:
    assert slo.missed(answered(tokens_s=(0.5, 0.55, 0.7))) == missed


def test_refused_and_failed_requests_are_not_good_and_are_told_by_reason() -> None:
    records = [
        answered(0),
        answered(1, tokens_s=(5.0, 5.1)),
        lost(2, "refused", "429 overloaded"),
        lost(3, "refused", "429 overloaded"),
        lost(4, "failed", "cut off"),
    ]
    summary = summarize_run(records, Slo(ttft_s=1.0))
    assert (summary.n_good, summary.good_share) == (1, 0.2)
    assert (summary.n_finished, summary.n_refused, summary.n_failed) == (2, 2, 1)
    assert summary.refusals == {"429 overloaded": 2}
    assert summary.failures == {"cut off": 1}
    assert (summary.n_missed_ttft, summary.n_missed_tbt) == (1, 0)
    # The last answer ended after 5.1 s.
    assert summary.goodput_per_s == pytest.approx(1 / 5.1)
    assert summary.n_cached_tokens == 80 and summary.n_prompt_tokens == 200


def test_what_the_endpoint_does_not_say_is_not_made_up() -> None:
    record = answered()
    record.n_cached = record.n_prompt = None
    summary = summarize_run([record], Slo())
    assert summary.n_cached_tokens is None
    assert summary.n_prompt_tokens == 100


def test_a_run_without_an_answer_has_a_summary() -> None:
    for records in ([], [lost(0, "failed", "no connection")]):
        summary = summarize_run(records, Slo(ttft_s=1.0))
        assert summary.n_good == summary.goodput_per_s == summary.output_tokens_per_s == 0


def test_offered_is_the_rate_of_arrivals_whatever_came_of_them() -> None:
    records = [answered(i, at_s=i / 4, tokens_s=(9.0,)) for i in range(9)]
    assert summarize_run(records, Slo()).offered_per_s == pytest.approx(4.0)


def test_a_late_generator_is_told_and_a_punctual_one_is_not() -> None:
    late = answered()
    late.sent_s = 0.3
    assert any("late itself" in text for text in result_warnings(summarize_run([late], Slo())))
    lagging = summarize_run([answered()], Slo(), loop_lags_s=[0.05] * 10)
    assert any("late itself" in text for text in result_warnings(lagging))
    assert result_warnings(summarize_run([answered()], Slo(), loop_lags_s=[0.001] * 10)) == []
    held = result_warnings(summarize_run([late], Slo(), n_held=3))
    assert len(held) == 1 and "3 requests waited for --max-in-flight" in held[0]


# Sending


def chain(index: int, *at_s: float) -> RequestChain:
    return tuple(
        PlannedRequest(index=index, at_s=each, parts=(PromptPart("p", 4),), n_output=2)
        for each in at_s
    )


class Run:
    """A run of requests that a test answers."""

    def __init__(self, *chains: RequestChain, **more: Any) -> None:
        loop, began_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        self.now: Callable[[], float] = lambda: loop.time() - began_s
        self.progress = RunProgress(sum(map(len, chains)))
        self.gate = asyncio.Event()
        self.generator = LoadGenerator(list(chains), self.send, self.now, self.progress, **more)

    async def send(self, planned: PlannedRequest, record: BenchRecord) -> None:
        record.sent_s = self.now()
        await self.answer(planned)
        record.finish(self.now(), "finished")

    async def answer(self, planned: PlannedRequest) -> None:
        """Wait until the test lets it."""
        await self.gate.wait()


async def test_a_request_that_is_held_back_counts_from_its_time_all_the_same() -> None:
    run = Run(*(chain(i, 0.0) for i in range(3)), most_in_flight=1)
    running = asyncio.create_task(run.generator.run())
    while run.progress.n_held < 2:
        await asyncio.sleep(0)
    run.gate.set()
    assert await running is False
    assert [record.scheduled_s for record in run.progress.records] == [0.0] * 3
    assert run.progress.n_held == 2 and run.progress.most_in_flight == 1


async def test_an_open_loop_sends_without_waiting_for_answers() -> None:
    run = Run(*(chain(i, 0.0) for i in range(20)))
    running = asyncio.create_task(run.generator.run())
    while run.progress.n_in_flight < 20:
        await asyncio.sleep(0)
    run.gate.set()
    await running
    assert run.progress.most_in_flight == 20


async def test_a_turn_waits_for_the_one_before_and_its_pause() -> None:
    run = Run(chain(0, 0.0, 0.02))
    asyncio.get_running_loop().call_later(0.01, run.gate.set)
    await run.generator.run()
    first, second = run.progress.records
    assert first.ended_s is not None
    assert second.scheduled_s >= first.ended_s + 0.02


async def test_stopping_drops_what_is_under_way_and_counts_what_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped: list[int] = []

    async def answer(planned: PlannedRequest) -> None:
        if planned.index:
            try:
                await asyncio.Event().wait()
            finally:
                dropped.append(planned.index)

    run = Run(chain(0, 0.0), chain(1, 0.0), chain(2, 3600.0))
    monkeypatch.setattr(run, "answer", answer)
    running = asyncio.create_task(run.generator.run())
    while run.progress.n_in_flight != 1 or not run.progress.records:
        await asyncio.sleep(0)
    run.progress.stop.set()
    assert await running is True
    assert [record.index for record in run.progress.records] == [0]
    assert dropped == [1] and run.progress.n_in_flight == 0


async def test_a_request_that_can_not_be_made_ends_the_run_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command prints an `OSError` or `ValueError` in a line; a group would be a traceback."""

    async def answer(planned: PlannedRequest) -> None:
        if planned.index:
            raise OSError("no descriptor is left")

    run = Run(*(chain(i, 0.0) for i in range(3)))
    monkeypatch.setattr(run, "answer", answer)
    with pytest.raises(OSError, match="no descriptor is left"):
        await run.generator.run()
