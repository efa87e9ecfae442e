"""Several runs from one: the same scenario with one choice varied, or several crossed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.colocated.colocated_baseline import ColocatedSpec
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
    name = name.strip().replace("-", "_")
    return Axis(OPTIONS.get(name, name), parts)


def expand_axes(base: Scenario, axes: Sequence[Axis]) -> list[Scenario]:
    """Return all combinations, the last axis varying fastest.

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


#: What options of the command are called where they are fields. "prefill" and "decode" are fields
#: of a cost file too, which no text stands for.
OPTIONS = {
    "prefill": "n_prefill",
    "decode": "n_decode",
    "coupled": "n_instances",
    "chunked": "chunk_tokens",
    "ttft_slo": "ttft_slo_s",
    "tbt_slo": "tbt_slo_s",
    "rate": "rate_per_s",
    "requests": "n_requests",
    "traces": "folder",
    "threshold": "kvcache_balancing_threshold",
}
#: Axes that say how fast requests come: what goodput is drawn over.
RATES = ("speedup", "rate_per_s")


def varies_rate(axes: Sequence[Axis]) -> bool:
    """Return whether an axis sets the rate of requests."""
    return any(axis.name in RATES for axis in axes)


def _with(scenario: Scenario, name: str, text: str) -> Scenario:
    parts = ("workload", "scheduling", "cluster", "costs")
    holders = {part: getattr(scenario, part) for part in parts}
    changed = {
        part: _changed(holder, name, text)
        for part, holder in holders.items()
        if name in holder.__struct_fields__
    }
    if changed:
        return msgspec.structs.replace(scenario, **changed)
    known = sorted({field for holder in holders.values() for field in holder.__struct_fields__})
    kind = "a coupled" if isinstance(scenario.cluster, ColocatedSpec) else "a"
    assert isinstance(scenario.cluster, ClusterSpec | ColocatedSpec)
    raise BadSweep(
        f"--sweep {name}: {kind} scenario has no such field; there are: {', '.join(known)}"
    )


def _changed(holder: msgspec.Struct, name: str, text: str) -> msgspec.Struct:
    """Return a copy with one field read from text."""
    try:
        fields = msgspec.to_builtins(holder)
        fields[name] = None if text == "none" and name != "admission" else text
        return msgspec.convert(fields, type(holder), strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise BadSweep(f"--sweep {name}={text}: {error}") from None
