"""Predict chunked pipeline parallel prefill: the seconds of a prompt in stages.

A group of X prefill workers holds the model's layers in X stages. A prompt is cut into chunks,
and chunk i is at stage k while chunk i+1 is at stage k-1 (Mooncake, arXiv 2407.00079, section
5.1). So X workers share one long prompt, and communicate only where a chunk changes stages. This
has two costs. The pipeline must fill first. And a later chunk takes longer than an earlier one,
since it attends to all tokens before it; the stages behind it wait for the longest chunk.
"""

from collections.abc import Sequence

from halfmoon_protocol.messages import PrefillCost

#: Least seconds that each pass of a chunk takes beside its tokens: messages, and its activations.
_LEAST_PASS_S = 0.002
#: Chunks of a prompt that are tried at the most: trying takes time.
_MOST_CHUNKS = 512


def stage_ends_s(
    cost: PrefillCost,
    n_tokens: int,
    n_cached: int,
    *,
    weights: Sequence[float],
    chunk_tokens: int,
    hop_s: float = 0.0,
    pass_s: float = 0.0,
) -> list[float]:
    """Return the seconds until the last chunk leaves each stage, on idle workers.

    A chunk enters a stage when it has left the stage before, and when the chunk before it has left
    this stage. With one stage this is the unscaled prefill time.

    Args:
        cost: the cost of the whole model at one worker.
        n_tokens: tokens of the prompt.
        n_cached: tokens at its start that need no computing.
        weights: each stage's part of that cost.
        chunk_tokens: most tokens of a chunk.
        hop_s: seconds from one stage to the next.
        pass_s: seconds that each chunk takes at each stage beside that cost.

    Raises:
        ValueError: no stages, no chunks, or nothing to compute.
    """
    if not 0 <= n_cached < n_tokens or chunk_tokens < 1 or not weights:
        raise ValueError(
            f"{n_tokens} tokens of which {n_cached} are cached, in chunks of {chunk_tokens} "
            f"through {len(weights)} stages: at least one token is computed, and there is at least "
            "one stage, and one token in a chunk"
        )
    leaves_s = [cost.c0_s] * len(weights)
    for start in range(n_cached, n_tokens, chunk_tokens):
        chunk_s = _chunk_s(cost, start, min(start + chunk_tokens, n_tokens))
        arrives_s = 0.0
        for stage, weight in enumerate(weights):
            arrives_s = max(leaves_s[stage], arrives_s) + weight * chunk_s + pass_s
            leaves_s[stage] = arrives_s
            arrives_s += hop_s
    return leaves_s


def choose_chunk_tokens(
    cost: PrefillCost,
    n_tokens: int,
    n_cached: int,
    *,
    weights: Sequence[float],
    most: int,
    step: int,
) -> int:
    """Return the tokens of a chunk with which the last one leaves the last stage soonest.

    Short chunks fill the stages sooner, and the last one, which takes longest, is over sooner. But
    each pass has a constant part, which several long chunks pay less often.

    Args:
        cost: the cost of the whole model at one worker.
        n_tokens: tokens of the prompt.
        n_cached: tokens at its start that need no computing.
        weights: each stage's part of that cost.
        most: tokens of the largest chunk.
        step: tokens of a block: chunks are halves of `most`, as long as they are so many blocks.

    Raises:
        ValueError: see `stage_ends_s`.
    """
    pass_s = max(cost.c0_s * max(weights), _LEAST_PASS_S)

    def end_s(chunk_tokens: int) -> float:
        ends_s = stage_ends_s(
            cost,
            n_tokens,
            n_cached,
            weights=weights,
            chunk_tokens=chunk_tokens,
            hop_s=_LEAST_PASS_S,
            pass_s=pass_s,
        )
        return ends_s[-1]

    sizes = [most]
    while (
        sizes[-1] % 2 == 0
        and sizes[-1] // 2 % step == 0
        and 2 * (n_tokens - n_cached) // sizes[-1] <= _MOST_CHUNKS
    ):
        sizes.append(sizes[-1] // 2)
    return min(sizes, key=end_s)


def _chunk_s(cost: PrefillCost, start: int, stop: int) -> float:
    """Return the seconds of tokens `start` to `stop` at one worker, without the constant part."""
    return (stop - start) * (cost.c1_s + cost.c2_s * (stop + start))
