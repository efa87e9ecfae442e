"""Check the settings of a load, and plan the requests that follow from them."""

from math import inf
from pathlib import Path

import msgspec

from halfmoon_cli.bench.bench_record import Slo, TbtDefinition
from halfmoon_cli.bench.load_plan import (
    RequestChain,
    plan_from_trace,
    plan_synthetic,
)
from halfmoon_simulator.workloads.synthetic_workloads import speed_up, spread_ticks
from halfmoon_simulator.workloads.traces import (
    TRACE_BLOCK_TOKENS,
    TraceRequest,
    describe_trace,
    read_trace,
)
from halfmoon_simulator.workloads.workload_sources import WorkloadSpec, make_workload


class BadBenchSettings(ValueError):
    """Settings that contradict each other or are out of range; the text names the flags."""


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run depends on but the endpoint: the load, and the limits of good requests."""

    #: A file, or the name of a simulator workload; "": a synthetic load.
    trace: str = ""
    #: Folder with published traces.
    traces: str = ""
    speedup: float = 1.0
    spread: bool = False
    #: Poisson arrivals of a synthetic load.
    rate_per_s: float | None = None
    #: None: 100, or all of a trace.
    n_requests: int | None = None
    duration_s: float | None = None
    input_tokens: int = 512
    output_tokens: int = 64
    shared_prefix_tokens: int = 0
    n_prefixes: int = 1
    block_tokens: int = TRACE_BLOCK_TOKENS
    scale_lengths: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    vocab: int | None = None
    ignore_eos: bool = True
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    tbt_by: TbtDefinition = "mean"
    max_in_flight: int = 1024
    timeout_s: float = 600.0
    seed: int = 0
    #: Mixed into every prompt: a new salt finds nothing cached of an earlier run.
    salt: str = ""

    def __post_init__(self) -> None:
        """Check ranges and combinations.

        Raises:
            BadBenchSettings: naming the flags.
        """
        if self.trace and self.rate_per_s is not None:
            raise BadBenchSettings(
                "--rate is for a made-up load; a trace goes faster with --speedup"
            )
        if not self.trace and self.rate_per_s is None:
            raise BadBenchSettings("how fast? Give --rate or --trace FILE")
        for flag, value in (
            ("--speedup", self.speedup),
            ("--rate", self.rate_per_s),
            ("--scale-lengths", self.scale_lengths),
            ("--duration", self.duration_s),
            ("--timeout", self.timeout_s),
            ("--ttft-slo", self.ttft_slo_s),
            ("--tbt-slo", self.tbt_slo_s),
        ):
            if value is not None and not 0 < value < inf:
                raise BadBenchSettings(f"{flag} is {value:g}, it must be more than 0")

    @property
    def slo(self) -> Slo:
        """Limits of a good request."""
        return Slo(self.ttft_slo_s, self.tbt_slo_s, self.tbt_by)


class BenchWorkload(msgspec.Struct, frozen=True):
    """Requests to send, and a line that describes them."""

    chains: list[RequestChain]
    description: str


def plan_workload(settings: BenchSettings) -> BenchWorkload:
    """Plan the requests of these settings.

    Raises:
        BadTrace: the trace can't be used.
        BadBenchSettings: no request is left to send.
        OSError: a file can't be read.
    """
    limit_s = settings.duration_s or inf
    if settings.rate_per_s is not None:
        return _synthetic(settings, settings.rate_per_s, limit_s)
    workload = _from_trace(settings)
    chains = [chain for chain in workload.chains if chain[0].at_s < limit_s]
    if not chains:
        raise BadBenchSettings(f"no request arrives within --duration {limit_s:g} s")
    return BenchWorkload(chains, workload.description)


def _synthetic(settings: BenchSettings, rate_per_s: float, limit_s: float) -> BenchWorkload:
    chains = plan_synthetic(
        rate_per_s=rate_per_s,
        n_requests=settings.n_requests or (inf if settings.duration_s else 100),
        until_s=limit_s,
        n_input=settings.input_tokens,
        n_output=settings.output_tokens,
        n_shared=settings.shared_prefix_tokens,
        n_prefixes=settings.n_prefixes,
        seed=settings.seed,
    )
    text = f"prompts of {settings.input_tokens} tokens"
    if settings.shared_prefix_tokens:
        text += f" after one of {settings.n_prefixes} prefixes of {settings.shared_prefix_tokens}"
    text += f", answers of {settings.output_tokens}, Poisson at {rate_per_s:g}/s"
    return BenchWorkload(chains, f"{text} (seed {settings.seed})")


def _from_trace(settings: BenchSettings) -> BenchWorkload:
    requests, text = _read_trace(settings)
    if settings.speedup != 1:
        text += f", {settings.speedup:g} times as fast"
    if settings.scale_lengths != 1:
        text += f", lengths times {settings.scale_lengths:g}"
    chains = plan_from_trace(
        requests,
        block_tokens=settings.block_tokens,
        scale=settings.scale_lengths,
        most_input=settings.max_input_tokens,
        most_output=settings.max_output_tokens,
    )
    return BenchWorkload(chains, text)


def _read_trace(settings: BenchSettings) -> tuple[list[TraceRequest], str]:
    path = Path(settings.trace)
    if not path.is_file():
        workload = make_workload(
            WorkloadSpec(
                source=settings.trace,
                folder=settings.traces,
                n_requests=settings.n_requests,
                speedup=settings.speedup,
                spread=settings.spread,
                seed=settings.seed,
            )
        )
        return workload.requests, workload.description
    requests = read_trace(path, block_tokens=settings.block_tokens)[: settings.n_requests]
    if settings.spread:
        requests = spread_ticks(requests)
    return speed_up(requests, settings.speedup), describe_trace(path)
