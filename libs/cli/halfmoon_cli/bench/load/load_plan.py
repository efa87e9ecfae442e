"""Which requests are sent, and when: drawn from a seed, or read from a trace. No I/O.

Arrivals, lengths and prefixes are drawn from generators of their own, so the same seed gives the
same requests at another rate.
"""

import random
from collections.abc import Iterable, Sequence

import msgspec

from halfmoon_cli.bench.load.length_distributions import LengthDistribution
from halfmoon_simulator.workloads.traces import TRACE_BLOCK_TOKENS, TraceRequest


class PromptPart(msgspec.Struct, frozen=True):
    """A run of a prompt's tokens. Equal keys stand for equal tokens, in every prompt."""

    key: str
    n_tokens: int


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to send."""

    index: int
    #: Seconds from the start; of a session's later turns from the end of the turn before.
    at_s: float
    parts: tuple[PromptPart, ...]
    n_output: int
    #: As traces write it: of those that wait the largest goes first.
    priority: int = 0

    @property
    def n_input(self) -> int:
        """Tokens of the prompt."""
        return sum(part.n_tokens for part in self.parts)


#: Requests of which each waits for the end of the one before: a session, mostly of one.
RequestChain = tuple[PlannedRequest, ...]


class SyntheticLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A load that is made up."""

    n_requests: int
    #: Requests per second, as a Poisson process; None: all may be sent at once.
    rate_per_s: float | None
    #: Tokens of a prompt after what it shares with others.
    own_tokens: LengthDistribution
    output_tokens: LengthDistribution
    #: Tokens at the start of a prompt that it shares with all others of the same prefix,
    shared_tokens: int = 0
    #: and how many such prefixes there are, each as likely.
    n_prefixes: int = 1


def plan_synthetic(load: SyntheticLoad, seed: int) -> list[RequestChain]:
    """The requests of a made-up load, in order of time."""
    arrivals = random.Random(f"arrivals {seed}")
    lengths = random.Random(f"lengths {seed}")
    prefixes = random.Random(f"prefixes {seed}")
    chains: list[RequestChain] = []
    at_s = 0.0
    for index in range(load.n_requests):
        parts: list[PromptPart] = []
        if load.shared_tokens:
            chosen = prefixes.randrange(load.n_prefixes)
            parts.append(PromptPart(f"prefix {chosen}", load.shared_tokens))
        parts.append(PromptPart(f"own {index}", load.own_tokens.draw(lengths)))
        n_output = load.output_tokens.draw(lengths)
        chains.append(
            (PlannedRequest(index=index, at_s=at_s, parts=tuple(parts), n_output=n_output),)
        )
        if load.rate_per_s is not None:
            at_s += arrivals.expovariate(load.rate_per_s)
    return chains


def plan_from_trace(
    requests: Iterable[TraceRequest],
    *,
    block_tokens: int = TRACE_BLOCK_TOKENS,
    scale: float = 1.0,
    most_input: int | None = None,
    most_output: int | None = None,
) -> list[RequestChain]:
    """The requests of a trace, in order of time.

    Args:
        requests: as `read_trace` gives them.
        block_tokens: tokens that one of its hash ids stands for.
        scale: prompts, blocks and answers are so many times as long; what was shared stays
            shared.
        most_input: prompts are cut after so many tokens.
        most_output: answers end after so many.
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
        # Sessions have names; a request without one is its own.
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


def cut_at_duration(chains: Iterable[RequestChain], duration_s: float | None) -> list[RequestChain]:
    """Those that begin before so many seconds have passed."""
    return [chain for chain in chains if duration_s is None or chain[0].at_s < duration_s]


class PlanStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is like, for the head of a report."""

    n_requests: int
    #: From the first arrival to the last one that is planned by the clock.
    duration_s: float
    mean_input_tokens: float
    mean_output_tokens: float
    #: Share of prompt tokens in parts that an earlier request had too, at the same place.
    shared: float


def plan_stats(chains: Sequence[RequestChain]) -> PlanStats:
    """Counts and means of a plan."""
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
