"""Name the measured rows, and turn seconds into figures, ratios and shares. No I/O."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.shapes import ModelShape, Precision

PREFILL_TOKENS = (512, 2048, 8192)
DECODE_BATCHES = (1, 8, 16)
DECODE_CONTEXTS = (512, 2048)
#: Tokens that each request of a decode row gets. The first two steps are not counted.
DECODE_STEPS = 16


@dataclass(frozen=True)
class PrefillRow:
    """One prompt, nothing of it cached, up to its first token."""

    n_tokens: int

    @property
    def label(self) -> str:
        """First cell of the table's row."""
        return f"prefill {self.n_tokens:,}, tokens/s"

    @property
    def sequences(self) -> tuple[int, ...]:
        """Tokens of each sequence that the pool must hold."""
        return (self.n_tokens + 1,)

    def operation(self) -> dict[str, Any]:
        """Return what a runner is told."""
        return {"op": "prefill", "n": self.n_tokens}

    def figure(self, seconds: float) -> str:
        """Return the cell."""
        return f"{self.n_tokens / seconds:,.0f}"

    def share(
        self, seconds: float, shape: ModelShape, precision: Precision, most: "Ceilings"
    ) -> float:
        """Return the share of the matrix product's speed."""
        return shape.prefill_flops(self.n_tokens) / seconds / most.flops_per_s


@dataclass(frozen=True)
class DecodeRow:
    """A step of some requests with the same number of tokens."""

    batch: int
    context: int

    @property
    def label(self) -> str:
        """First cell of the table's row."""
        return f"decode {self.batch} × {self.context:,}, ms a step"

    @property
    def sequences(self) -> tuple[int, ...]:
        """Tokens of each sequence that the pool must hold."""
        return (self.context + DECODE_STEPS,) * self.batch

    def operation(self) -> dict[str, Any]:
        """Return what a runner is told."""
        steps = DECODE_STEPS
        return {"op": "decode", "batch": self.batch, "context": self.context, "steps": steps}

    def figure(self, seconds: float) -> str:
        """Return the cell."""
        return f"{seconds * 1e3:.1f}"

    def share(
        self, seconds: float, shape: ModelShape, precision: Precision, most: "Ceilings"
    ) -> float:
        """Return the share of the memory's reading speed."""
        context = self.context + DECODE_STEPS // 2
        return shape.decode_bytes(self.batch, context, precision) / seconds / most.bytes_per_s


MeasuredRow = PrefillRow | DecodeRow
ROWS: tuple[MeasuredRow, ...] = (
    *map(PrefillRow, PREFILL_TOKENS),
    *(DecodeRow(batch, context) for batch in DECODE_BATCHES for context in DECODE_CONTEXTS),
)


@dataclass(frozen=True)
class Ceilings:
    """What the cores can do at most, medians of the run."""

    flops_per_s: float
    bytes_per_s: float


def pool_sequences(rows: Sequence[MeasuredRow]) -> tuple[int, ...]:
    """Return the sequences of the row that needs the largest pool."""
    return max((row.sequences for row in rows), key=sum, default=())


def comparison_table(
    rows: Sequence[MeasuredRow],
    systems: Sequence[str],
    seconds: Mapping[tuple[str, MeasuredRow], Sequence[float]],
    shape: ModelShape,
    precision: Precision,
    most: Ceilings | None,
    *,
    beside: str,
) -> str:
    """Return a table: a row per measurement; figures, ratios of speed, shares of the ceiling.

    Args:
        rows: to show.
        systems: columns.
        seconds: of each system and row, of all rounds; none: it was not measured.
        shape: of the model.
        precision: of weights and KV.
        most: ceilings; None: no shares.
        beside: the system that the others' speed is divided by.
    """
    others = [system for system in systems if system != beside and beside in systems]
    heads = [*systems, *(f"{each} to {beside}" for each in others)]
    heads += [f"{each}, of the ceiling" for each in systems] if most else []
    lines = [f"| {shape.name}, {precision} | {' | '.join(heads)} |", "|---" * (len(heads) + 1)]
    lines[1] += "|"
    for row in rows:
        medians = {
            system: statistics.median(found) if (found := seconds.get((system, row), ())) else None
            for system in systems
        }
        cells = [_cell(median, row.figure) for median in medians.values()]
        for system in others:
            ours, theirs = medians[system], medians[beside]
            cells.append("–" if ours is None or theirs is None else f"{theirs / ours:.2f}")
        if most:
            cells += [
                "–" if median is None else f"{row.share(median, shape, precision, most):.2f}"
                for median in medians.values()
            ]
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def conversion_table(
    rows: Sequence[MeasuredRow],
    seconds: Mapping[tuple[str, MeasuredRow], Sequence[float]],
    converting: Mapping[tuple[str, MeasuredRow], Sequence[float]],
) -> str:
    """Return a table: what copies between the pool's layout and a kernel's take of each row.

    Args:
        rows: to show.
        seconds: of each system and row.
        converting: seconds of these in such copies, of the systems that have any.
    """
    systems = list(dict.fromkeys(system for system, _ in converting))
    heads = [head for each in systems for head in (f"{each}, ms", "of its time")]
    lines = [f"| copies to the pool's layout | {' | '.join(heads)} |", "|---" * (len(heads) + 1)]
    lines[1] += "|"
    for row in rows:
        cells: list[str] = []
        for system in systems:
            copies, whole = converting.get((system, row)), seconds.get((system, row))
            if not copies or not whole:
                cells += ["–", "–"]
                continue
            copying_s = statistics.median(copies)
            cells += [f"{copying_s * 1e3:.2f}", f"{copying_s / statistics.median(whole):.1%}"]
        lines.append(f"| {row.label.rpartition(', ')[0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_rows(
    systems: Sequence[str], started: Mapping[str, int], peak: Mapping[str, int], n_tokens: int
) -> str:
    """Return rows of a table of its own: resident memory in MiB, without KV pools."""
    lines = [f"| resident MiB, without KV | {' | '.join(systems)} |"]
    lines.append("|---" * (len(systems) + 1) + "|")
    for label, found in (("after the start", started), (f"most in prefill {n_tokens:,}", peak)):
        cells = [f"{found[each] / 2**20:,.0f}" if each in found else "–" for each in systems]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(median: float | None, figure: Any) -> str:
    return "–" if median is None else str(figure(median))
