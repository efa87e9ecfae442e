"""What a user asked for, checked, and the requests that follow from it."""

from math import inf
from pathlib import Path
from typing import Literal

import msgspec

from halfmoon_cli.bench.load.bench_record import Slo, TbtDefinition
from halfmoon_cli.bench.load.length_distributions import parse_lengths
from halfmoon_cli.bench.load.load_plan import (
    RequestChain,
    SyntheticLoad,
    cut_at_duration,
    plan_from_trace,
    plan_synthetic,
)
from halfmoon_cli.bench.load.prompt_writer import ApiKind
from halfmoon_simulator.workloads.synthetic_workloads import speed_up, spread_ticks
from halfmoon_simulator.workloads.traces import (
    TRACE_BLOCK_TOKENS,
    TraceRequest,
    describe_trace,
    read_trace,
)
from halfmoon_simulator.workloads.workload_sources import WorkloadSpec, make_workload

PromptKind = Literal["auto", "token-ids", "text"]


class BadBenchSettings(ValueError):
    """Settings that contradict each other or can't be kept; the text names the flags."""


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A load, and how it is judged: all that a run depends on but the endpoint."""

    #: A file, or a workload that the simulator knows by name; "": made up.
    trace: str = ""
    #: Folder with published traces.
    traces: str = ""
    speedup: float = 1.0
    spread: bool = False
    #: Poisson arrivals of a made-up load.
    rate_per_s: float | None = None
    #: Instead of a clock: requests under way at all times.
    concurrency: int | None = None
    #: None: 100, or all of a trace.
    n_requests: int | None = None
    duration_s: float | None = None
    input_tokens: str = "512"
    output_tokens: str = "64"
    shared_prefix_tokens: int = 0
    n_prefixes: int = 1
    block_tokens: int = TRACE_BLOCK_TOKENS
    scale_lengths: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    api: ApiKind = "completions"
    prompt: PromptKind = "auto"
    vocab: int | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    tbt_by: TbtDefinition = "mean"
    n_warmup: int = 1
    max_in_flight: int = 1024
    timeout_s: float = 600.0
    seed: int = 0
    #: Mixed into every prompt: another one, and nothing is cached of an earlier run.
    salt: str = ""

    def __post_init__(self) -> None:
        """Check what belongs together.

        Raises:
            BadSettings: naming the flags.
            BadLengths: lengths that can't be read.
        """
        if self.trace and self.rate_per_s is not None:
            raise BadBenchSettings(
                "--rate is for a made-up load; a trace goes faster with --speedup"
            )
        if self.rate_per_s is not None and self.concurrency is not None:
            raise BadBenchSettings(
                "--rate and --concurrency: choose the clock, or the number of users"
            )
        if not self.trace and self.rate_per_s is None and self.concurrency is None:
            raise BadBenchSettings("how fast? Give --rate, --concurrency, or --trace FILE")
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
        if self.api == "chat" and self.prompt == "token-ids":
            raise BadBenchSettings("--api chat takes no token ids: leave --prompt token-ids out")
        parse_lengths(self.input_tokens)
        parse_lengths(self.output_tokens)

    @property
    def slo(self) -> Slo:
        """What makes a request good."""
        return Slo(self.ttft_slo_s, self.tbt_slo_s, self.tbt_by)

    @property
    def can_go_faster(self) -> bool:
        """Whether a clock drives it."""
        return self.concurrency is None

    def times(self, factor: float) -> "BenchSettings":
        """The same requests, arriving so many times as fast."""
        if self.rate_per_s is not None:
            return msgspec.structs.replace(self, rate_per_s=self.rate_per_s * factor)
        return msgspec.structs.replace(self, speedup=self.speedup * factor)


class BenchWorkload(msgspec.Struct, frozen=True):
    """Requests to send, and a line that says what they are."""

    chains: list[RequestChain]
    description: str


def plan_workload(settings: BenchSettings) -> BenchWorkload:
    """The requests that these settings stand for.

    Raises:
        BadTrace: the trace can't be used.
        BadSettings: nothing is left to send.
        OSError: a file can't be read.
    """
    workload = _from_trace(settings) if settings.trace else _made_up(settings)
    # Users are not bound to the clock, so `duration_s` ends them while they run.
    duration_s = settings.duration_s if settings.concurrency is None else None
    chains = cut_at_duration(workload.chains, duration_s)
    if not chains:
        raise BadBenchSettings(f"no request arrives within --duration {settings.duration_s:g} s")
    return BenchWorkload(chains, workload.description)


def _made_up(settings: BenchSettings) -> BenchWorkload:
    n_requests = settings.n_requests or 100
    if settings.n_requests is None and settings.duration_s and settings.rate_per_s:
        # So many do not come in that time, but for one chance in ten thousand.
        expected = settings.duration_s * settings.rate_per_s
        n_requests = int(expected + 4 * expected**0.5) + 1
    load = SyntheticLoad(
        n_requests=n_requests,
        rate_per_s=settings.rate_per_s,
        own_tokens=parse_lengths(settings.input_tokens),
        output_tokens=parse_lengths(settings.output_tokens),
        shared_tokens=settings.shared_prefix_tokens,
        n_prefixes=settings.n_prefixes,
    )
    text = f"prompts of {load.own_tokens} tokens"
    if load.shared_tokens:
        text += f" after one of {load.n_prefixes} prefixes of {load.shared_tokens}"
    text += f", answers of {load.output_tokens}"
    if load.rate_per_s is not None:
        text += f", Poisson at {load.rate_per_s:g}/s"
    return BenchWorkload(plan_synthetic(load, settings.seed), f"{text} (seed {settings.seed})")


def _from_trace(settings: BenchSettings) -> BenchWorkload:
    requests, text = _read(settings)
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


def _read(settings: BenchSettings) -> tuple[list[TraceRequest], str]:
    path = Path(settings.trace)
    if not path.is_file():
        made = make_workload(
            WorkloadSpec(
                source=settings.trace,
                folder=settings.traces,
                n_requests=settings.n_requests,
                speedup=settings.speedup,
                spread=settings.spread,
                seed=settings.seed,
            )
        )
        return made.requests, made.description
    requests = read_trace(path, block_tokens=settings.block_tokens)[: settings.n_requests]
    if settings.spread:
        requests = spread_ticks(requests)
    return speed_up(requests, settings.speedup), describe_trace(path)
