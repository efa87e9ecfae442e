"""Plan the requests of a load and their times: drawn from a seed, or read from a trace. No I/O."""

import random
from collections.abc import Iterable, Sequence

import msgspec

from halfmoon_simulator.workloads.traces import TRACE_BLOCK_TOKENS, TraceRequest


class PromptPart(msgspec.Struct, frozen=True):
    """A run of a prompt's tokens. Equal keys stand for equal tokens, in every prompt."""

    key: str
    n_tokens: int


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to send."""

    index: int
    #: Seconds from the start; for a later turn of a session, from the end of the turn before.
    at_s: float
    parts: tuple[PromptPart, ...]
    n_output: int
    #: Priority of a trace: the largest goes first.
    priority: int = 0

    @property
    def n_input(self) -> int:
        """Tokens of the prompt."""
        return sum(part.n_tokens for part in self.parts)


#: A session: each request waits for the end of the one before. Most have one request.
RequestChain = tuple[PlannedRequest, ...]


def plan_synthetic(
    *,
    rate_per_s: float,
    n_requests: float,
    until_s: float,
    n_input: int,
    n_output: int,
    n_shared: int = 0,
    n_prefixes: int = 1,
    seed: int = 0,
) -> list[RequestChain]:
    """Draw Poisson arrivals of prompts with equal lengths, in order of time.

    Arrivals and prefixes have generators of their own: a seed gives the same prompts at any rate.

    Args:
        rate_per_s: mean arrivals per second.
        n_requests: arrivals at most.
        until_s: end of the arrivals; this or `n_requests` is finite.
        n_input: tokens of a prompt after its shared prefix.
        n_output: tokens of an answer.
        n_shared: tokens of a shared prefix.
        n_prefixes: number of different prefixes, each as likely.
        seed: of all draws.
    """
    arrivals = random.Random(f"arrivals {seed}")
    prefixes = random.Random(f"prefixes {seed}")
    chains: list[RequestChain] = []
    at_s = 0.0
    while (index := len(chains)) < n_requests and at_s < until_s:
        prefix = PromptPart(f"prefix {prefixes.randrange(n_prefixes)}", n_shared)
        parts = (prefix, PromptPart(f"own {index}", n_input))[not n_shared :]
        chains.append((PlannedRequest(index=index, at_s=at_s, parts=parts, n_output=n_output),))
        at_s += arrivals.expovariate(rate_per_s)
    return chains


def plan_from_trace(
    requests: Iterable[TraceRequest],
    *,
    block_tokens: int = TRACE_BLOCK_TOKENS,
    scale: float = 1.0,
    most_input: int | None = None,
    most_output: int | None = None,
) -> list[RequestChain]:
    """Plan the requests of a trace, in order of time.

    Args:
        requests: as `read_trace` gives them.
        block_tokens: tokens of one hash id.
        scale: factor of prompt, block and answer lengths; shared prefixes stay shared.
        most_input: longest prompt; longer ones are cut.
        most_output: longest answer.
    """
    block = max(1, round(block_tokens * scale))
    chains: dict[str, list[PlannedRequest]] = {}
    for index, request in enumerate(requests):
        n_last = request.n_input - block_tokens * (len(request.blocks) - 1)
        last = min(block, max(1, round(n_last * scale)))
        parts = [PromptPart(f"block {each}", block) for each in request.blocks]
        parts[-1] = PromptPart(parts[-1].key, last)
        planned = PlannedRequest(
            index=index,
            at_s=request.at_s,
            parts=_cut(parts, most_input),
            n_output=min(max(1, round(request.n_output * scale)), most_output or request.n_output),
            priority=request.priority,
        )
        # Sessions have names; a request without one is a chain of its own.
        name = f"alone {index}" if request.session is None else f"session {request.session}"
        chains.setdefault(name, []).append(planned)
    return sorted(map(tuple, chains.values()), key=lambda chain: chain[0].at_s)


def _cut(parts: Sequence[PromptPart], most: int | None) -> tuple[PromptPart, ...]:
    if most is None:
        return tuple(parts)
    kept: list[PromptPart] = []
    for part in parts:
        if most < 1:
            break
        kept.append(PromptPart(part.key, min(part.n_tokens, most)))
        most -= part.n_tokens
    return tuple(kept)


class PlanStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and means of a plan, for the head of a report."""

    n_requests: int
    #: Seconds between the first and the last arrival by the clock.
    duration_s: float
    mean_input_tokens: float
    mean_output_tokens: float
    #: Share of prompt tokens in parts that an earlier request had too.
    shared: float


def plan_stats(chains: Sequence[RequestChain]) -> PlanStats:
    """Return counts and means of a plan."""
    requests = [request for chain in chains for request in chain]
    seen: set[str] = set()
    n_shared = 0
    for request in requests:
        for part in request.parts:
            n_shared += part.n_tokens if part.key in seen else 0
            seen.add(part.key)
    n_input = sum(request.n_input for request in requests)
    starts = [chain[0].at_s for chain in chains]
    return PlanStats(
        n_requests=len(requests),
        duration_s=max(starts, default=0.0) - min(starts, default=0.0),
        mean_input_tokens=n_input / max(1, len(requests)),
        mean_output_tokens=sum(r.n_output for r in requests) / max(1, len(requests)),
        shared=n_shared / n_input if n_input else 0.0,
    )
