"""Parts of prompts between decode steps: the mean time between tokens, and the prediction of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_scheduling.prefill.part_pacing import PartPacing, forecast_parts

SECONDS = st.floats(0.001, 0.5)


def step_until_due(pacing: PartPacing, step_s: float) -> int:
    n_steps = 0
    while not pacing.is_due:
        pacing.on_steps(1, step_s)
        n_steps += 1
    return n_steps


def test_steps_make_up_for_a_part_before_the_next_one_is_due() -> None:
    pacing = PartPacing(0.025)
    assert pacing.steps_until_due(0.01) == 0
    pacing.on_part(0.15)  # each step of 10 ms pays 15 ms
    assert pacing.steps_until_due(0.01) == 10
    pacing.on_steps(9, 0.01)
    assert (pacing.steps_until_due(0.01), pacing.is_due) == (1, False)
    pacing.on_steps(1, 0.01)
    assert (pacing.steps_until_due(0.01), pacing.is_due) == (0, True)


def test_nothing_is_owed_to_an_empty_batch_or_without_a_limit() -> None:
    for limit_s in (0.0, 0.025):
        pacing = PartPacing(limit_s)
        pacing.on_part(5.0)
        assert pacing.is_due == (limit_s == 0)
        pacing.on_idle()
        assert pacing.is_due


@given(st.lists(SECONDS, min_size=1, max_size=5), st.floats(0.001, 0.0218))
def test_the_mean_between_tokens_is_within_the_limit(parts: list[float], step_s: float) -> None:
    pacing, n_steps = PartPacing(0.025), 0
    for part_s in parts:
        pacing.on_part(part_s)
        foreseen = pacing.steps_until_due(step_s)
        n_taken = step_until_due(pacing, step_s)
        assert n_taken == foreseen
        n_steps += n_taken
    assert sum(parts) + n_steps * step_s <= 0.025 * n_steps * (1 + 1e-6)


def test_a_batch_that_is_over_the_limit_by_itself_delays_no_prompt_for_ever() -> None:
    pacing = PartPacing(0.025)
    pacing.on_part(0.05)
    assert step_until_due(pacing, 0.04) == 16  # an eighth of the limit each


def test_a_worker_without_parts_computes_all_in_one_step_and_a_part_has_a_block_at_least() -> None:
    whole = forecast_parts(1.0, pass_s=0.01, block_s=0.02, step_s=0.04, max_step_s=0.0, tbt_s=0.0)
    assert whole.seconds == whole.mean_step_s == pytest.approx(1.05)
    parts = forecast_parts(0.1, pass_s=0.01, block_s=0.02, step_s=0.3, max_step_s=0.1, tbt_s=0.0)
    assert parts.seconds == pytest.approx(0.1 + 5 * 0.31)
    assert parts.mean_step_s == pytest.approx(0.33)


@given(SECONDS, SECONDS, st.floats(0.0, 0.3), st.floats(0.01, 1.0), st.floats(0.01, 0.3))
def test_what_is_predicted_is_what_pacing_does(
    work_s: float, pass_s: float, step_s: float, max_step_s: float, tbt_s: float
) -> None:
    block_s = work_s / 7
    forecast = forecast_parts(
        work_s,
        pass_s=pass_s,
        block_s=block_s,
        step_s=step_s,
        max_step_s=max_step_s,
        tbt_s=tbt_s,
    )
    room_s = max(max_step_s - step_s - pass_s, block_s)
    pacing, left_s, seconds = PartPacing(tbt_s), work_s, 0.0
    while left_s > 1e-9 * work_s:
        n_waited = step_until_due(pacing, step_s) if step_s else 0
        seconds += n_waited * step_s
        part_s = pass_s + min(left_s, room_s)
        left_s -= min(left_s, room_s)
        seconds += part_s + step_s  # the step that the part is in
        if step_s:
            pacing.on_part(part_s)
            pacing.on_steps(1, step_s)
    assert forecast.seconds == pytest.approx(seconds, rel=1e-6)
    if step_s and step_s <= 0.8 * tbt_s:
        assert forecast.mean_step_s <= tbt_s * (1 + 1e-9)
