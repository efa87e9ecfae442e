"""Workloads that are made rather than read: transformed traces, synthetic ones, stand-ins.

Everything is drawn from a seed with Python's own generator, so the same arguments give the
same requests on every machine.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from halfmoon_simulator.workloads.traces import TRACE_BLOCK_TOKENS, TraceRequest, with_sessions


class SyntheticDataset(msgspec.Struct, frozen=True, kw_only=True):
    """The distributions of a synthetic workload's requests."""

    #: Mean tokens of a prompt and of an answer.
    mean_input: float
    mean_output: float
    #: Share of each prompt that is the start of an earlier one: a document asked about again.
    cache_ratio: float
    #: Standard deviation of the logarithm of both lengths; 0: all are equal.
    spread: float


#: The data sets of Mooncake's Table 2 (arXiv 2407.00079): mean lengths and cache ratio are the
#: paper's; the spread is ours for the two real sets, whose distributions are not printed.
DATASETS = {
    "arxiv-summarization": SyntheticDataset(
        mean_input=8088, mean_output=229, cache_ratio=0.0, spread=0.6
    ),
    "l-eval": SyntheticDataset(mean_input=19019, mean_output=72, cache_ratio=0.8, spread=0.6),
    "simulated-16k": SyntheticDataset(
        mean_input=16384, mean_output=512, cache_ratio=0.5, spread=0.0
    ),
    "simulated-32k": SyntheticDataset(
        mean_input=32768, mean_output=512, cache_ratio=0.5, spread=0.0
    ),
    "simulated-64k": SyntheticDataset(
        mean_input=65536, mean_output=512, cache_ratio=0.5, spread=0.0
    ),
    "simulated-128k": SyntheticDataset(
        mean_input=131072, mean_output=512, cache_ratio=0.5, spread=0.0
    ),
}


def synthetic_requests(
    lengths: SyntheticDataset,
    *,
    n_requests: int,
    rate_per_s: float,
    seed: int,
    questions_per_document: int = 8,
) -> list[TraceRequest]:
    """Poisson arrivals of prompts that share documents.

    A prompt is a document, `cache_ratio` of its length, and a tail of its own. Documents are
    asked about `questions_per_document` times each, in random order, so all but the first
    prompt of a document can reuse it.
    """
    if rate_per_s <= 0 or n_requests < 1:
        raise ValueError(f"rate_per_s {rate_per_s} and n_requests {n_requests} must be above 0")
    dice = random.Random(f"synthetic {seed}")
    ids = _Ids()
    documents: list[tuple[int, list[int], int]] = []  # length, blocks, questions left
    n_open = max(1, n_requests // (4 * questions_per_document))
    requests: list[TraceRequest] = []
    at_s = 0.0
    for _ in range(n_requests):
        at_s += dice.expovariate(rate_per_s)
        n_output = max(2, round(_draw(dice, lengths.mean_output, lengths.spread)))
        while len(documents) < n_open:
            n_input = max(2, round(_draw(dice, lengths.mean_input, lengths.spread)))
            n_shared = int(n_input * lengths.cache_ratio) // TRACE_BLOCK_TOKENS
            documents.append((n_input, ids.new(n_shared), questions_per_document))
        chosen = dice.randrange(len(documents))
        n_input, shared, left = documents[chosen]
        n_blocks = -(-n_input // TRACE_BLOCK_TOKENS)
        blocks = (*shared, *ids.new(n_blocks - len(shared)))
        requests.append(TraceRequest(at_s, n_input, n_output, blocks))
        if left > 1:
            documents[chosen] = (n_input, shared, left - 1)
        else:
            documents.pop(chosen)
    return requests


def speed_up(requests: Iterable[TraceRequest], speedup: float) -> list[TraceRequest]:
    """Return the same requests `speedup` times as fast, pauses within sessions included.

    So the papers replay their traces "2×": all stamps are divided, and those of a conversation's
    later turns are stamps like others.
    """
    if speedup <= 0:
        raise ValueError(f"speedup is {speedup}, it must be more than 0")
    return [
        request if speedup == 1 else replace(request, at_s=request.at_s / speedup)
        for request in requests
    ]


def lengthen_answers(requests: Sequence[TraceRequest], times: float) -> list[TraceRequest]:
    """Return the same requests with answers `times` times as long, at least one token."""
    if times == 1:
        return list(requests)
    return [replace(r, n_output=max(1, round(r.n_output * times))) for r in requests]


def spread_ticks(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Spread requests that share a time stamp evenly up to the next stamp.

    The published traces are stamped in steps of 3 s. Replayed as they are, a step's requests
    arrive in one instant, which no cluster sees. A session's later turns have no stamp, but a
    pause, and keep it.
    """
    groups = Counter(
        request.at_s for request, goes_on in with_sessions(requests) if goes_on is None
    )
    stamps = sorted(groups)
    after_last = 2 * stamps[-1] - stamps[max(0, len(stamps) - 2)]
    following = dict(zip(stamps, [*stamps[1:], after_last], strict=True))
    taken: dict[float, int] = {}
    result: list[TraceRequest] = []
    for request, goes_on in with_sessions(requests):
        if goes_on is not None:
            result.append(request)
            continue
        at_s = request.at_s
        share = taken.get(at_s, 0) / groups[at_s]
        taken[at_s] = taken.get(at_s, 0) + 1
        result.append(replace(request, at_s=at_s + share * (following[at_s] - at_s)))
    return result


def conversation_surrogate(n_requests: int = 12_031, *, seed: int = 0) -> list[TraceRequest]:
    """Make a stand-in for the published conversation trace from its published statistics.

    Sessions grow turn by turn behind one common first block; arrivals in steps of 3 s at
    3.4 requests/s; mean input about 12,000 tokens, mean output about 343, about 0.37 of the
    block references reusable. Individual requests are invented.
    """
    dice = random.Random(f"conversation surrogate {seed}")
    ids = _Ids()
    common = ids.new(1)
    waiting: list[tuple[float, list[int], int]] = []  # next turn, full blocks, tokens
    requests: list[TraceRequest] = []
    at_s = 0.0
    while len(requests) < n_requests:
        for _ in range(_poisson(dice, 10.2)):
            if len(requests) == n_requests:
                break
            waiting.sort(key=lambda turn: turn[0])
            if waiting and waiting[0][0] <= at_s:
                _, blocks, before = waiting.pop(0)
                n_input = before + max(16, round(_draw(dice, 900, 1.0)))
            else:
                blocks = list(common)
                n_input = min(126_000, max(900, round(_draw(dice, 10_900, 0.95))))
            full = n_input // TRACE_BLOCK_TOKENS
            blocks = [*blocks, *ids.new(full - len(blocks))] if full > len(blocks) else blocks
            last = ids.new(-(-n_input // TRACE_BLOCK_TOKENS) - len(blocks))
            n_output = min(2000, max(1, round(_draw(dice, 343, 0.6))))
            requests.append(TraceRequest(at_s, n_input, n_output, (*blocks, *last)))
            if dice.random() < 0.36 and n_input < 110_000:
                pause_s = _draw(dice, 170, 1.0)
                waiting.append((at_s + pause_s, blocks, n_input + n_output))
        at_s += 3.0
    return requests


def arxiv_surrogate(
    conversation: Sequence[TraceRequest], n_requests: int = 23_608, *, seed: int = 0
) -> list[TraceRequest]:
    """Make a stand-in for the trace of arXiv 2407.00079, which may not be at hand.

    A slice of that trace shows three families of prompts: chats like those of the
    conversation trace, an agent with a shared prefix of 12 blocks, and one with 5. Here the
    chats are drawn from a conversation trace, in its order and at its times; the agents' tails
    are of their own. Counts are those reported for the first blocks (10,938, 9,203, 3,449),
    arrivals are in steps of 3,050 ms.
    """
    dice = random.Random(f"arxiv surrogate {seed}")
    n_chat = min(len(conversation), round(n_requests * 10_938 / 23_608))
    n_long = round((n_requests - n_chat) * 9_203 / (9_203 + 3_449))
    duration_s = max(request.at_s for request in conversation)
    # Long chats are rarer there than in the conversation trace.
    ranked = sorted(range(len(conversation)), key=lambda i: conversation[i].n_input)
    n_dropped = len(conversation) - n_chat
    dropped = set(
        dice.sample(ranked[-max(1, len(ranked) // 6) :], min(n_dropped, len(ranked) // 6))
    )
    chats = [request for i, request in enumerate(conversation) if i not in dropped][:n_chat]
    ids = _Ids(1 + max(block for request in chats for block in request.blocks))
    requests = list(chats)
    for shared, n, mean_tail, mean_output in (
        (ids.new(12), n_long, 460, 40),
        (ids.new(5), n_requests - n_chat - n_long, 680, 20),
    ):
        for _ in range(n):
            tail = min(2_856, max(25, round(_draw(dice, mean_tail, 0.7))))
            n_input = len(shared) * TRACE_BLOCK_TOKENS + tail
            n_blocks = -(-n_input // TRACE_BLOCK_TOKENS)
            n_output = 3 if dice.random() < 0.3 else max(3, round(_draw(dice, mean_output, 0.4)))
            blocks = (*shared, *ids.new(n_blocks - len(shared)))
            requests.append(TraceRequest(dice.random() * duration_s, n_input, n_output, blocks))
    stepped = [replace(r, at_s=int(r.at_s / 3.05) * 3.05) for r in requests]
    return sorted(stepped, key=lambda request: request.at_s)


class _Ids:
    """Block ids in order of first use."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def new(self, n: int) -> list[int]:
        self._next += n
        return list(range(self._next - n, self._next))


def _draw(dice: random.Random, mean: float, spread: float) -> float:
    """From a log-normal distribution of this mean."""
    return mean if spread == 0 else dice.lognormvariate(math.log(mean) - spread**2 / 2, spread)


def _poisson(dice: random.Random, mean: float) -> int:
    n, product, limit = 0, dice.random(), math.exp(-mean)
    while product > limit:
        n += 1
        product *= dice.random()
    return n
