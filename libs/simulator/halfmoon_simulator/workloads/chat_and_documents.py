"""A workload of short prompts that are due soon, and of long ones that are due late.

A prefill queue in order of arrival lets the short ones wait behind the long ones.
"""

import random

from halfmoon_simulator.workloads.traces import TRACE_BLOCK_TOKENS, TraceRequest

#: Mean tokens of prompt and answer, and seconds until the first token is due.
CHAT = (1_024, 200, 2.0)
DOCUMENT = (32_768, 200, 30.0)
#: Share of the requests that ask about a document.
DOCUMENT_SHARE = 0.15


def chat_and_documents(*, n_requests: int, rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Poisson arrivals of prompts that share nothing; lengths vary by half to either side.

    Raises:
        ValueError: a number or a rate that is not above 0.
    """
    if rate_per_s <= 0 or n_requests < 1:
        raise ValueError(f"rate_per_s {rate_per_s} and n_requests {n_requests} must be above 0")
    dice = random.Random(f"chat and documents {seed}")
    requests: list[TraceRequest] = []
    at_s, next_block = 0.0, 0
    for _ in range(n_requests):
        at_s += dice.expovariate(rate_per_s)
        mean_input, mean_output, limit_s = DOCUMENT if dice.random() < DOCUMENT_SHARE else CHAT
        n_input = max(1, round(mean_input * dice.uniform(0.5, 1.5)))
        n_output = max(2, round(mean_output * dice.uniform(0.5, 1.5)))
        n_blocks = -(-n_input // TRACE_BLOCK_TOKENS)
        blocks = tuple(range(next_block, next_block + n_blocks))
        next_block += n_blocks
        requests.append(TraceRequest(at_s, n_input, n_output, blocks, ttft_slo_s=limit_s))
    return requests
