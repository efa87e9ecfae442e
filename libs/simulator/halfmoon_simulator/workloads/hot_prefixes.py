"""A workload of a few prefixes that many ask about, and that change: what replication is for.

Every prompt is one of a few long documents and a question of its own. Some documents are asked
about far more often than others, and every so often one gives way to a new one, as news does.
"""

import random

from halfmoon_simulator.workloads.traces import TRACE_BLOCK_TOKENS, TraceRequest

#: Documents at any time; the n-th is asked about 1/n as often as the first.
N_DOCUMENTS = 8
#: Blocks of a document, new to all workers when it appears: 32,768 tokens.
DOCUMENT_BLOCKS = 64
#: Seconds after which one document, each in its turn, gives way to a new one.
TURNOVER_S = 30.0
#: Tokens of a question at the most, and of an answer on average.
MAX_QUESTION_TOKENS = 2 * TRACE_BLOCK_TOKENS
MEAN_OUTPUT = 150


def hot_prefix_requests(*, n_requests: int, rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Poisson arrivals of questions about documents.

    Raises:
        ValueError: a number or a rate that is not above 0.
    """
    if rate_per_s <= 0 or n_requests < 1:
        raise ValueError(f"rate_per_s {rate_per_s} and n_requests {n_requests} must be above 0")
    dice = random.Random(f"hot prefixes {seed}")
    weights = [1 / n for n in range(1, N_DOCUMENTS + 1)]
    next_block = 0

    def new(n_blocks: int) -> list[int]:
        nonlocal next_block
        next_block += n_blocks
        return list(range(next_block - n_blocks, next_block))

    documents = [new(DOCUMENT_BLOCKS) for _ in range(N_DOCUMENTS)]
    requests: list[TraceRequest] = []
    at_s, n_turned = 0.0, 0
    for _ in range(n_requests):
        at_s += dice.expovariate(rate_per_s)
        while n_turned < int(at_s / TURNOVER_S):
            documents[n_turned % N_DOCUMENTS] = new(DOCUMENT_BLOCKS)
            n_turned += 1
        (document,) = dice.choices(documents, weights)
        n_question = dice.randint(1, MAX_QUESTION_TOKENS)
        blocks = (*document, *new(-(-n_question // TRACE_BLOCK_TOKENS)))
        n_output = max(2, round(dice.expovariate(1 / MEAN_OUTPUT)))
        n_input = DOCUMENT_BLOCKS * TRACE_BLOCK_TOKENS + n_question
        requests.append(TraceRequest(at_s, n_input, n_output, blocks))
    return requests
