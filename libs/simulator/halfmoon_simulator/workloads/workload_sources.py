"""Describe a workload by one frozen value from which any process can make it.

A published trace that is not at hand is replaced by its stand-in, and the description says so.
"""

from math import inf
from pathlib import Path

import msgspec

from halfmoon_simulator.workloads.chat_and_documents import chat_and_documents
from halfmoon_simulator.workloads.conversations import conversations
from halfmoon_simulator.workloads.hot_prefixes import hot_prefix_requests
from halfmoon_simulator.workloads.load_oscillation import oscillating_load
from halfmoon_simulator.workloads.synthetic_workloads import (
    DATASETS,
    SyntheticDataset,
    arxiv_surrogate,
    conversation_surrogate,
    lengthen_answers,
    speed_up,
    spread_ticks,
    synthetic_requests,
)
from halfmoon_simulator.workloads.traces import (
    KNOWN_TRACES,
    BadTrace,
    TraceRequest,
    describe_trace,
    read_trace,
)

#: Lengths of the published synthetic trace, for its stand-in.
_SYNTHETIC = SyntheticDataset(mean_input=15_325, mean_output=149, cache_ratio=0.78, spread=0.9)

#: Workloads that are made by a rate and a seed alone.
_MADE = {
    "chat-and-documents": chat_and_documents,
    "conversations": conversations,
    "hot-prefixes": hot_prefix_requests,
    "swinging": oscillating_load,
}


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kind, number and rate of requests."""

    #: A file, or the name of a published trace, or of a data set in `workloads.DATASETS`,
    #: or "chat-and-documents", "conversations", "hot-prefixes" or "swinging".
    source: str
    #: Where published traces are looked for, by their published file names.
    folder: str = ""
    #: The first so many requests; None: all.
    n_requests: int | None = None
    #: Requests arrive so many times as fast as the source says.
    speedup: float = 1.0
    #: Requests per second of a data set.
    rate_per_s: float = 1.0
    #: Answers are so many times as long as the source says.
    output_times: float = 1.0
    #: Spread the requests of one time stamp over the time to the next.
    spread: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what an operator may have written.

        Raises:
            ValueError: naming the field, the value and what is allowed.
        """
        for name in ("speedup", "rate_per_s", "output_times"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name):g}, it must be more than 0")
        if self.n_requests is not None and self.n_requests < 1:
            raise ValueError(f"n_requests is {self.n_requests}, it is at least 1; none: all")


class DescribedWorkload(msgspec.Struct, frozen=True):
    """Requests, and a line that says what they are."""

    requests: list[TraceRequest]
    description: str


def make_workload(spec: WorkloadSpec) -> DescribedWorkload:
    """Make the requests of a description.

    Raises:
        BadTrace: an unknown source, or a file that is no trace.
    """
    if (lengths := DATASETS.get(spec.source)) is not None:
        n = spec.n_requests or 1000
        requests = synthetic_requests(
            lengths, n_requests=n, rate_per_s=spec.rate_per_s, seed=spec.seed
        )
        text = (
            f"{spec.source}: {lengths.mean_input:g} tokens in, {lengths.mean_output:g} out,"
            f" {lengths.cache_ratio:.0%} cached, Poisson at {spec.rate_per_s:g}/s"
            f" (seed {spec.seed})"
        )
        return DescribedWorkload(_adjust(requests, spec), text)
    if (make := _MADE.get(spec.source)) is not None:
        n = spec.n_requests or 1000
        requests = make(n_requests=n, rate_per_s=spec.rate_per_s, seed=spec.seed)
        text = f"{spec.source}: Poisson at {spec.rate_per_s:g}/s (seed {spec.seed})"
        return DescribedWorkload(_adjust(requests, spec), text)
    workload = _trace(spec)
    requests = workload.requests[: spec.n_requests]
    if spec.spread:
        requests = spread_ticks(requests)
    return DescribedWorkload(_adjust(requests, spec), workload.description)


def _adjust(requests: list[TraceRequest], spec: WorkloadSpec) -> list[TraceRequest]:
    return lengthen_answers(speed_up(requests, spec.speedup), spec.output_times)


def _trace(spec: WorkloadSpec) -> DescribedWorkload:
    known = next((known for known in KNOWN_TRACES if known.name == spec.source), None)
    path = Path(spec.folder) / known.file_name if known is not None else Path(spec.source)
    if path.is_file():
        return DescribedWorkload(read_trace(path), describe_trace(path))
    missing = f"SURROGATE, {path.name} not found in {spec.folder or 'any folder'}: "
    match spec.source:
        case "conversation":
            return DescribedWorkload(
                conversation_surrogate(seed=spec.seed),
                missing + "sessions made from the trace's published statistics",
            )
        case "arxiv" | "toolagent":
            base = _trace(msgspec.structs.replace(spec, source="conversation"))
            return DescribedWorkload(
                arxiv_surrogate(base.requests, seed=spec.seed),
                missing + f"chats of ({base.description}) and two agents with shared prefixes,"
                " in the published proportions",
            )
        case "synthetic":
            requests = synthetic_requests(
                _SYNTHETIC, n_requests=3_993, rate_per_s=3.91, seed=spec.seed
            )
            return DescribedWorkload(requests, missing + "Poisson, lengths and reuse as published")
        case _:
            names = ", ".join([*(known.name for known in KNOWN_TRACES), *DATASETS, *_MADE])
            raise BadTrace(f"{spec.source!r} is no file and none of: {names}")


def find_traces() -> str:
    """Find the folder with published traces: ./traces or ../shared/traces, else ""."""
    for folder in (Path("traces"), Path("../shared/traces")):
        if any((folder / known.file_name).is_file() for known in KNOWN_TRACES):
            return str(folder)
    return ""
