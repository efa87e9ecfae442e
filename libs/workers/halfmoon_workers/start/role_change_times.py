"""Measure changes of role: seconds of each phase, as metrics, a span and a log line.

- `drain`: from the conductor's command until the worker's record is removed.
- `rest`: while writers of given-up landings may still write to the pool.
- `start`: until the worker takes requests in its new role.
"""

from dataclasses import dataclass, field

import structlog

from halfmoon_protocol.messages import Role
from halfmoon_runtime.clock import Clock, SystemClock
from halfmoon_runtime.observability.histogram import FastHistogram, time_buckets
from halfmoon_runtime.observability.metrics import MetricSnapshot, by_label
from halfmoon_runtime.observability.tracing import Tracer

log = structlog.get_logger()

_PHASES = ("drain", "rest", "start")


def _histograms() -> dict[str, FastHistogram]:
    return {phase: FastHistogram(time_buckets(0.001, 1000.0)) for phase in _PHASES}


@dataclass
class RoleChangeTimes:
    """Note when each phase of a change ends; live as long as the process."""

    clock: Clock = field(default_factory=SystemClock)
    #: None: no traces.
    tracer: Tracer | None = None
    #: Times at which the phases of the present change began; empty: none is under way.
    _began_s: list[float] = field(default_factory=list, init=False)
    _histograms: dict[str, FastHistogram] = field(default_factory=_histograms, init=False)

    def begin(self) -> None:
        """Note that a change begins with its first phase."""
        self._began_s = [self.clock.now()]

    def abandon(self) -> None:
        """Forget the present change: the worker keeps its role."""
        self._began_s.clear()

    def next_phase(self) -> None:
        """Note that a phase of the present change ends, and the next one begins."""
        assert 1 <= len(self._began_s) < len(_PHASES), "no change, or no further phase"
        self._began_s.append(self.clock.now())

    def complete(self, before: Role, role: Role) -> None:
        """Record the change that ends now."""
        assert len(self._began_s) == len(_PHASES), "phases are missing"
        ends_s = [*self._began_s[1:], self.clock.now()]
        stages = list(zip(_PHASES, self._began_s, ends_s, strict=True))
        self._began_s = []
        seconds = {phase: ended_s - began_s for phase, began_s, ended_s in stages}
        for phase, took_s in seconds.items():
            self._histograms[phase].observe(took_s)
        log.info("role_changed", before=before, role=role, **_rounded(seconds))
        if self.tracer is None:
            return
        attributes = {"halfmoon.role_before": before, "halfmoon.role": role}
        first_s, last_s = stages[0][1], stages[-1][2]
        span = self.tracer.serve("role change", lambda _: [], first_s, attributes)
        if span is not None:
            for phase, began_s, ended_s in stages:
                span.stage(phase, began_s, ended_s)
            span.end(last_s)

    def metrics(self) -> MetricSnapshot:
        """Return the seconds of all changes by phase."""
        return {
            "halfmoon_role_change_seconds": (
                "Seconds of changes of role by phase: drain, rest of the pool, start.",
                by_label("phase", self._histograms),
            )
        }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {f"{phase}_s": round(took_s, 3) for phase, took_s in seconds.items()}
