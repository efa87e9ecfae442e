"""Draw numbers as characters: bars, sparklines, times. No I/O."""

from collections.abc import Sequence

from rich.text import Text

_LEVELS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 10


def bar(n: int, n_all: int, *, fuller_is_worse: bool = True) -> Text:
    """Return a bar and a share of the part that is taken."""
    if n_all <= 0:
        return Text("–", "dim")
    share = min(max(n / n_all, 0.0), 1.0)
    n_full = round(share * _BAR_WIDTH)
    # A small share is shown as one character at least.
    n_full = max(n_full, 1) if n > 0 else n_full
    style = "green"
    if fuller_is_worse and share > 0.7:
        style = "red" if share > 0.9 else "yellow"
    return Text.assemble(
        ("█" * n_full, style), ("░" * (_BAR_WIDTH - n_full), "dim"), f" {share:4.0%}"
    )


def sparkline(values: Sequence[float | None]) -> str:
    """Return a line of characters from 0 to the largest value; a gap stands for None."""
    top = max((value for value in values if value is not None), default=0.0)
    return "".join(_level(value, top) for value in values)


def _level(value: float | None, top: float) -> str:
    if value is None:
        return " "
    return _LEVELS[min(len(_LEVELS) - 1, int(value / top * len(_LEVELS)))] if top > 0 else "▁"


def format_duration(seconds: float) -> str:
    """Format seconds with a fitting unit."""
    if seconds < 0.00995:
        return f"{seconds * 1e3:.1f} ms" if seconds > 0 else "0"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"


def format_bytes(n_bytes: int) -> str:
    """Format bytes with a fitting unit."""
    amount, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.3g} {unit}"
