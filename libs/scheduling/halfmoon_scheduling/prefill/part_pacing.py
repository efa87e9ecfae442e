"""Space the parts of prompts between decode steps, so that the mean time between tokens is kept.

    part │ step │ step │ step │ part │ step …

A part costs each running request its seconds. Each step that is shorter than the limit pays the
difference back. The next part is due when all is paid. So parts may be long, which reads the
weights less often, and requests still get their tokens in time on average.
"""

from dataclasses import dataclass
from math import ceil

#: A step near the limit, or over it, pays this share of the limit: parts never stop for good.
_LEAST_PAYMENT = 1 / 8
#: Relative error of a sum of seconds, so that rounding asks for no further step.
_ROUNDING = 1e-9


def _payment_s(step_s: float, tbt_s: float) -> float:
    return max(tbt_s - step_s, _LEAST_PAYMENT * tbt_s)


def _steps_to_pay(debt_s: float, step_s: float, tbt_s: float) -> int:
    return ceil(debt_s / _payment_s(step_s, tbt_s) - _ROUNDING)


class PartPacing:
    """Tell when the next part of a prompt is due beside a running batch."""

    def __init__(self, tbt_s: float) -> None:
        """Start without a debt.

        Args:
            tbt_s: mean seconds between tokens to keep; 0: a part is due after each step.
        """
        self._tbt_s = tbt_s
        self._debt_s = 0.0

    @property
    def is_due(self) -> bool:
        """Return whether steps have paid for all parts so far."""
        return self._debt_s <= _ROUNDING * self._tbt_s

    def steps_until_due(self, step_s: float) -> int:
        """Return how many steps of such a length pay for all parts so far."""
        return 0 if self.is_due else _steps_to_pay(self._debt_s, step_s, self._tbt_s)

    def on_part(self, seconds: float) -> None:
        """Record a part that running requests waited for."""
        if self._tbt_s:
            self._debt_s += seconds

    def on_steps(self, n_steps: int, step_s: float) -> None:
        """Record steps of such a length."""
        if self._debt_s:
            self._debt_s = max(0.0, self._debt_s - n_steps * _payment_s(step_s, self._tbt_s))

    def on_idle(self) -> None:
        """Record that no request runs: none waits for what is owed."""
        self._debt_s = 0.0


@dataclass(frozen=True, slots=True)
class PartsForecast:
    """Prediction of a prompt that is computed in parts beside a batch."""

    #: From its first part to its last, with the steps between them.
    seconds: float
    #: Mean seconds between tokens of the batch meanwhile.
    mean_step_s: float


def forecast_parts(
    work_s: float,
    *,
    pass_s: float,
    block_s: float,
    step_s: float,
    max_step_s: float,
    tbt_s: float,
) -> PartsForecast:
    """Predict a prompt's parts.

    Args:
        work_s: seconds of its uncached tokens, without what each pass takes.
        pass_s: what each pass takes besides.
        block_s: the part of `work_s` that one block takes, the least part.
        step_s: a step of the batch; 0: nothing runs.
        max_step_s: most seconds of a part and a step; 0: the prompt is computed in one step.
        tbt_s: see `PartPacing`.
    """
    if not max_step_s:
        return PartsForecast(step_s + pass_s + work_s, step_s + pass_s + work_s)
    room_s = max(max_step_s - step_s - pass_s, block_s)
    n_parts = max(1, ceil(work_s / room_s - _ROUNDING)) if room_s > 0 else 1
    part_s = pass_s + min(work_s, room_s)
    n_steps = 1
    if tbt_s and step_s:
        n_steps = max(1, _steps_to_pay(part_s, step_s, tbt_s))
    mean_s = step_s + part_s / n_steps
    if step_s + _payment_s(step_s, tbt_s) <= tbt_s:
        mean_s = min(mean_s, tbt_s)  # but for rounding
    seconds = work_s + n_parts * (pass_s + step_s) + (n_parts - 1) * (n_steps - 1) * step_s
    return PartsForecast(seconds, mean_s)
