"""Show results of the search as tables. No I/O."""

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from halfmoon_cli.bench.run_summary import BenchSummary


class UnloadedResult(msgspec.Struct, frozen=True):
    """A system's times with one request after the other."""

    #: Medians over the requests, seconds.
    ttft_s: float
    tbt_s: float
    #: Processor time of its processes while nothing is asked, in cores.
    idle_cores: float


class RateResult(msgspec.Struct, frozen=True):
    """What a rate came to."""

    rate: float
    summary: BenchSummary
    #: Processor time of the system's processes meanwhile, in cores.
    busy_cores: float


class SearchResult(msgspec.Struct, frozen=True):
    """One search: the highest good rate, and all rates that were tried."""

    best: float | None
    rates: tuple[RateResult, ...]

    @property
    def at_best(self) -> RateResult | None:
        """What the highest good rate came to."""
        return next((each for each in self.rates if each.rate == self.best), None)


def unloaded_table(unloaded: Mapping[str, UnloadedResult]) -> str:
    """Return a row per system: its times without load, and what it takes when idle."""
    lines = ["| without load | TTFT p50, ms | TBT p50, ms | idle, of a core |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {each.ttft_s * 1e3:.1f} | {each.tbt_s * 1e3:.1f} | {each.idle_cores:.1%} |"
        for name, each in unloaded.items()
    ]
    return "\n".join(lines)


def search_table(load: str, found: Mapping[str, Sequence[SearchResult]]) -> str:
    """Return a row per system: the median highest good rate, the ratio to it, its figures.

    The ratio is of the first system's rate to this one's. "Cached" is the share of the prompts'
    tokens; "cores" is the processor time of the system's processes over the time.
    """
    heads = f"{load}: requests/s with ≥ 90 % good | {next(iter(found), '')} to it | good share"
    heads += " | TTFT p50 / p99, ms | TBT p99, ms | cached | cores"
    lines = [f"| | {heads} |", "|---|---|---|---|---|---|---|---|"]
    bests = {name: median_best(results) for name, results in found.items()}
    first = next(iter(bests.values()), 0.0)
    for name, results in found.items():
        best = bests[name]
        ratio = f"{first / best:.2f}" if best else "–"
        shown = min(results, key=lambda each: abs((each.best or 0.0) - best), default=None)
        at_best = shown.at_best if shown else None
        lines.append(f"| {name} | {best:.2f} | {ratio} | {_figures(at_best)} |")
    return "\n".join(lines)


def rates_table(load: str, found: Mapping[str, Sequence[SearchResult]]) -> str:
    """Return a row per system and rate that was tried, in order of the rates."""
    heads = f"{load}, all rates | requests/s | good share | TTFT p50 / p99, ms | TBT p99, ms"
    lines = [f"| {heads} | cached | cores |", "|---|---|---|---|---|---|---|"]
    for name, results in found.items():
        rates = [each for result in results for each in result.rates]
        lines += [
            f"| {name} | {each.rate:.2f} | {_figures(each)} |"
            for each in sorted(rates, key=lambda each: each.rate)
        ]
    return "\n".join(lines)


def median_best(results: Sequence[SearchResult]) -> float:
    """Return the median of the highest good rates; 0 where there was none."""
    return statistics.median([each.best or 0.0 for each in results]) if results else 0.0


def _figures(result: RateResult | None) -> str:
    if result is None:
        return "– | – | – | – | –"
    each = result.summary
    ttft = f"{each.ttft_s.p50 * 1e3:.0f} / {each.ttft_s.p99 * 1e3:.0f}"
    gaps = f"{each.gap_s.p99 * 1e3:.1f}"
    cached = "–"
    if each.n_cached_tokens is not None and each.n_prompt_tokens:
        cached = f"{each.n_cached_tokens / each.n_prompt_tokens:.2f}"
    return f"{each.good_share:.2f} | {ttft} | {gaps} | {cached} | {result.busy_cores:.2f}"
