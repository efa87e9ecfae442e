"""Make the two loads: chats that share much of their prompts, and the same without sharing.

Both have the lengths of one slice of the published conversation trace. No I/O.
"""

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from halfmoon_cli.bench.load_plan import (
    PlannedRequest,
    PromptPart,
    RequestChain,
    plan_from_trace,
)
from halfmoon_simulator.workloads.traces import TraceRequest

#: Lengths of prompts, blocks and answers, as a share of the trace's.
LENGTHS = 1 / 16
#: Longest prompt that is kept, after that.
MOST_TOKENS = 2048
#: A chat is kept if so many of the trace's requests begin with its first two blocks. (Nearly all
#: requests of the trace have the first block in common.)
LEAST_IN_FAMILY = 5


def heavy_slice(requests: Sequence[TraceRequest], n: int) -> list[PlannedRequest]:
    """Return the first `n` requests of as few chats as have so many, in the trace's order.

    Chats are taken whole, in the order of their beginnings. So a short slice shares about as
    much of its prompts as a long one.
    """
    short = [
        request
        for request in requests
        if len(request.blocks) > 1 and request.n_input * LENGTHS <= MOST_TOKENS
    ]
    sizes = Counter(request.blocks[1] for request in short)
    chosen: set[int] = set()
    n_chosen = 0
    for request in short:
        chat = request.blocks[1]
        if n_chosen < n and sizes[chat] >= LEAST_IN_FAMILY and chat not in chosen:
            chosen.add(chat)
            n_chosen += sizes[chat]
    kept = [request for request in short if request.blocks[1] in chosen][:n]
    return [chain[0] for chain in plan_from_trace(kept, scale=LENGTHS)]


def without_sharing(requests: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """Return requests of the same lengths whose prompts have nothing in common."""
    return [
        msgspec.structs.replace(request, parts=(PromptPart(f"own {i}", request.n_input),))
        for i, request in enumerate(requests)
    ]


def arriving(
    requests: Sequence[PlannedRequest], *, rate_per_s: float, seconds: float, seed: int
) -> list[RequestChain]:
    """Return the first requests with Poisson arrivals, so many a second, for so long.

    Where there are too few requests they come again, with other prompts.
    """
    dice = random.Random(f"arrivals {seed}")
    chains: list[RequestChain] = []
    at_s = 0.0
    while at_s < seconds:
        lap, place = divmod(len(chains), len(requests))
        request = requests[place]
        parts = tuple(PromptPart(f"{lap} {part.key}", part.n_tokens) for part in request.parts)
        planned = msgspec.structs.replace(request, index=len(chains), at_s=at_s, parts=parts)
        chains.append((planned,))
        at_s += dice.expovariate(rate_per_s)
    return chains


def one_by_one(requests: Sequence[PlannedRequest]) -> list[RequestChain]:
    """Return requests as one session: each is sent when the one before has ended."""
    return [
        tuple(
            msgspec.structs.replace(request, index=i, at_s=0.0)
            for i, request in enumerate(requests)
        )
    ]
