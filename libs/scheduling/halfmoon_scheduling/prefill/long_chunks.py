"""Choose how many tokens of a prompt to compute in a forward pass of its own.

A larger chunk costs less: each pass reads all weights, and each chunk gathers all KV before it. But
nothing else begins before the pass ends: no urgent prompt, and no cancellation takes effect. So a
chunk is bounded in predicted seconds, and in tokens, since activations take memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt

from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.prediction.cost_model import (
    MAX_SCALE,
    MIN_SCALE,
    ExponentialMean,
    unscaled_prefill_s,
)


@dataclass(frozen=True, slots=True)
class LongChunkLimits:
    """Bounds of a prompt's chunk that has a pass to itself."""

    max_tokens: int
    #: Predicted seconds of the pass.
    max_s: float
    #: Chunks have whole multiples of so many tokens: only complete blocks are handed on.
    step_tokens: int = 1

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ValueError: naming the field, the value and what is allowed.
        """
        if self.max_tokens < 1 or self.step_tokens < 1 or not self.max_s > 0:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, step_tokens {self.step_tokens}; the least is 1."
                f" max_s is {self.max_s}; it must be above 0"
            )


class LongChunks:
    """Predict forward passes from a worker's cost, corrected by the durations of its passes."""

    def __init__(self, limits: LongChunkLimits, cost: PrefillCost) -> None:
        """Start without observed passes.

        Args:
            limits: of a chunk.
            cost: of one pass; c0 is the part that every pass takes.
        """
        self._limits = limits
        self._cost = cost
        self._observed_s: ExponentialMean | None = None
        self._predicted_s = ExponentialMean(0.0)
        #: Seconds of the limit that belong to something else, such as a step of a decode batch
        #: that waits for the pass.
        self.reserved_s = 0.0

    @property
    def scale(self) -> float:
        """Return how many times as long as predicted the passes take."""
        if self._observed_s is None:
            return 1.0
        return min(MAX_SCALE, max(MIN_SCALE, self._observed_s.value / self._predicted_s.value))

    def predict_s(self, start: int, stop: int) -> float:
        """Return the predicted seconds of a run of tokens that is computed in one pass."""
        return self.scale * unscaled_prefill_s(self._cost, stop, start)

    def tokens_from(self, start: int) -> int:
        """Return the most tokens of a chunk that begins at this position; perhaps 0.

        The seconds left after c0 are c1·k + c2·k·(2·start + k), solved for k.
        """
        left_s = (self._limits.max_s - self.reserved_s) / self.scale - self._cost.c0_s
        if left_s <= 0:
            return 0
        linear_s = self._cost.c1_s + 2 * self._cost.c2_s * start
        root_s = sqrt(linear_s * linear_s + 4 * self._cost.c2_s * left_s)
        # This form of the root holds for c2 = 0 too, and subtracts no near values.
        tokens = 2 * left_s / (linear_s + root_s) if linear_s + root_s > 0 else inf
        step = self._limits.step_tokens
        return int(min(self._limits.max_tokens, tokens)) // step * step

    def observe(self, spans: Iterable[tuple[int, int]], seconds: float) -> None:
        """Learn the seconds of a pass over these runs of tokens, each from start to stop."""
        predicted_s = self._cost.c0_s + sum(
            unscaled_prefill_s(self._cost, stop, start) - self._cost.c0_s for start, stop in spans
        )
        if predicted_s <= 0 or seconds <= 0:
            return
        # One odd pass, such as the first one after the start, must not count for long.
        seconds = min(seconds, MAX_SCALE * predicted_s)
        if self._observed_s is None:
            self._observed_s = ExponentialMean(predicted_s)
            self._predicted_s = ExponentialMean(predicted_s)
        self._observed_s.observe(seconds)
        self._predicted_s.observe(predicted_s)
