"""Several runs from one: the same scenario with one choice varied, or several crossed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from halfmoon_simulator.cluster_spec import ClusterSpec
from halfmoon_simulator.coupled import CoupledSpec
from halfmoon_simulator.scenario import Scenario


class BadSweep(ValueError):
    """A sweep that can't be made; the text says which part of it and what there is."""


@dataclass(frozen=True)
class Axis:
    """One choice and the values that it takes."""

    name: str
    values: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """Read ``placement=random,min_ttft`` or ``speedup=1,2,3``.

    Raises:
        BadSweep: not of this form.
    """
    name, equals, values = text.partition("=")
    parts = tuple(part.strip() for part in values.split(",") if part.strip())
    if not (name.strip() and equals and parts):
        raise BadSweep(f"--sweep {text!r} is not of the form NAME=VALUE,VALUE,…")
    return Axis(name.strip().replace("-", "_"), parts)


def vary(base: Scenario, axes: Sequence[Axis]) -> list[Scenario]:
    """All combinations, the last axis varying fastest.

    An axis is a field of the workload, of the scheduling, of the cluster, or of the cost file.

    Raises:
        BadSweep: no such field, or a value that it can't have.
    """
    scenarios: list[Scenario] = []
    for values in product(*(axis.values for axis in axes)):
        scenario = base
        for axis, value in zip(axes, values, strict=True):
            scenario = _with(scenario, axis.name, value)
        label = ", ".join(
            f"{a.name}={v}" for a, v in zip(axes, values, strict=True) if a.name not in RATES
        )
        rates = ", ".join(
            f"{a.name}={v}" for a, v in zip(axes, values, strict=True) if a.name in RATES
        )
        label = f"{label or base.label} @ {rates}" if rates else label or base.label
        scenarios.append(msgspec.structs.replace(scenario, label=label))
    return scenarios


#: Axes that say how fast requests come: what goodput is drawn over.
RATES = ("speedup", "rate_per_s")


def varies_rate(axes: Sequence[Axis]) -> bool:
    """Whether an axis says how fast requests come."""
    return any(axis.name in RATES for axis in axes)


def _with(scenario: Scenario, name: str, text: str) -> Scenario:
    parts = ("workload", "scheduling", "cluster", "costs")
    for part in parts:
        holder = getattr(scenario, part)
        if name in holder.__struct_fields__:
            try:
                fields = msgspec.to_builtins(holder)
                fields[name] = None if text == "none" and name != "admission" else text
                changed = msgspec.convert(fields, type(holder), strict=False)
            except (msgspec.ValidationError, ValueError) as error:
                raise BadSweep(f"--sweep {name}={text}: {error}") from None
            return msgspec.structs.replace(scenario, **{part: changed})
    known = sorted(field for part in parts for field in getattr(scenario, part).__struct_fields__)
    kind = "a coupled" if isinstance(scenario.cluster, CoupledSpec) else "a"
    assert isinstance(scenario.cluster, ClusterSpec | CoupledSpec)
    raise BadSweep(
        f"--sweep {name}: {kind} scenario has no such field; there are: {', '.join(known)}"
    )
