"""Chunked pipeline parallel prefill: how long a group takes, and when to take one.

A group of X prefill workers holds the model's layers in X stages. A prompt is cut into chunks,
and chunk i is at stage k while chunk i+1 is at stage k-1 (Mooncake, arXiv 2407.00079, section
5.1). So X workers share one long prompt, and talk only where a chunk changes stages. What it
costs is seen chunk by chunk: the pipeline must fill first, and a later chunk takes longer than
an earlier one, since it attends to all before it. Short prompts are better off at one worker.

Plain functions: no worker of ours forms groups yet, see `docs/scheduling.md`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.placement import Estimate


@dataclass(frozen=True, slots=True)
class Group:
    """Prefill workers that hold the layers in stages, in this order."""

    members: tuple[WorkerId, ...]
    #: Of the whole model at one worker: a stage takes its share of it.
    cost: PrefillCost
    #: Seconds in which a chunk's activations go from one stage to the next.
    hop_s: float = 0.0
    #: Tokens of a chunk at the most.
    chunk_tokens: int = 1024


@dataclass(frozen=True, slots=True)
class GroupEstimate:
    """What is predicted for one group."""

    group: Group
    #: Until the busiest member is free: a chunk needs all stages.
    queue_s: float
    transfer_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        """Predicted seconds to the first token."""
        return self.queue_s + self.transfer_s + self.prefill_s


def chunk_seconds(
    cost: PrefillCost, n_tokens: int, n_cached: int, chunk_tokens: int
) -> list[float]:
    """Seconds of each chunk at one worker, without the constant part: they grow.

    Raises:
        ValueError: nothing to compute, or chunks of no tokens.
    """
    if not 0 <= n_cached < n_tokens or chunk_tokens < 1:
        raise ValueError(
            f"{n_tokens} tokens of which {n_cached} are cached, in chunks of {chunk_tokens}: at "
            "least one token is computed, and a chunk has at least one"
        )
    seconds = []
    for start in range(n_cached, n_tokens, chunk_tokens):
        stop = min(start + chunk_tokens, n_tokens)
        computed = stop - start
        seconds.append(cost.c1_s * computed + cost.c2_s * computed * (stop + start))
    return seconds


def pipeline_s(
    cost: PrefillCost,
    n_tokens: int,
    n_cached: int,
    *,
    n_stages: int,
    chunk_tokens: int,
    hop_s: float = 0.0,
) -> float:
    """Seconds until the last chunk leaves the last stage, on idle workers.

    A chunk enters a stage when it has left the one before and the chunk before it has left
    this one. With equal chunks and no hops that is (stages - 1 + chunks) times a chunk's
    share; with one stage it is `T_prefill`.

    Args:
        cost: of the whole model at one worker.
        n_tokens: tokens of the prompt.
        n_cached: the first so many need no computing.
        n_stages: workers of the group.
        chunk_tokens: tokens of a chunk at the most.
        hop_s: seconds from one stage to the next.

    Raises:
        ValueError: no stages, no chunks, or nothing to compute.
    """
    if n_stages < 1:
        raise ValueError(f"{n_stages} stages; a pipeline has at least 1")
    leaves_s = [0.0] * n_stages
    for seconds in chunk_seconds(cost, n_tokens, n_cached, chunk_tokens):
        arrives_s = 0.0
        for stage in range(n_stages):
            leaves_s[stage] = max(leaves_s[stage], arrives_s) + seconds / n_stages
            arrives_s = leaves_s[stage] + hop_s
    return cost.c0_s + leaves_s[-1]


def choose_group(
    single: Estimate,
    groups: Sequence[Group],
    queues_s: Mapping[WorkerId, float],
    *,
    n_tokens: int,
    n_cached: int,
    transfer_s: float,
    least_gain: float = 1.2,
) -> GroupEstimate | None:
    """The group to prefill a prompt, or None when one worker is as good.

    A group keeps all its members busy for one prompt, so that it must be faster by a factor:
    what is gained by a little would be paid by those who come next.

    Args:
        single: the best single worker's estimate.
        groups: those that are there.
        queues_s: predicted seconds until each worker is free.
        n_tokens: tokens of the prompt.
        n_cached: tokens whose KV the group would fetch.
        transfer_s: seconds of fetching them.
        least_gain: how many times as long the single worker must take.
    """
    estimates = [
        GroupEstimate(
            group,
            max(queues_s[member] for member in group.members),
            transfer_s,
            pipeline_s(
                group.cost,
                n_tokens,
                n_cached,
                n_stages=len(group.members),
                chunk_tokens=group.chunk_tokens,
                hop_s=group.hop_s,
            ),
        )
        for group in groups
    ]
    best = min(estimates, key=lambda e: (e.ttft_s, e.queue_s, e.group.members), default=None)
    if best is None or single.ttft_s < least_gain * best.ttft_s:
        return None
    return best
