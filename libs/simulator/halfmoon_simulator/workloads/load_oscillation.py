"""A workload whose mix swings: long prompts with short answers, then short ones with long ones.

By turns prefill and decode are what is short, so that no fixed number of workers on each side is
right for long: what changing roles is for.
"""

import random

from halfmoon_simulator.workloads.traces import TRACE_BLOCK_TOKENS, TraceRequest

#: Seconds of one phase; the first one has long prompts.
PHASE_S = 600.0
#: Mean tokens of prompt and answer, and requests for each one of the rate, in either phase.
LONG_PROMPTS = (16_384, 100, 1.0)
LONG_ANSWERS = (512, 1_200, 8.0)


def oscillating_load(*, n_requests: int, rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Poisson arrivals of prompts that share nothing; lengths vary by half to either side.

    Raises:
        ValueError: a number or a rate that is not above 0.
    """
    if rate_per_s <= 0 or n_requests < 1:
        raise ValueError(f"rate_per_s {rate_per_s} and n_requests {n_requests} must be above 0")
    dice = random.Random(f"swinging {seed}")
    requests: list[TraceRequest] = []
    at_s, next_block = 0.0, 0
    for _ in range(n_requests):
        phase = LONG_ANSWERS if int(at_s / PHASE_S) % 2 else LONG_PROMPTS
        mean_input, mean_output, times = phase
        at_s += dice.expovariate(rate_per_s * times)
        n_input = max(1, round(mean_input * dice.uniform(0.5, 1.5)))
        n_output = max(2, round(mean_output * dice.uniform(0.5, 1.5)))
        n_blocks = -(-n_input // TRACE_BLOCK_TOKENS)
        blocks = tuple(range(next_block, next_block + n_blocks))
        next_block += n_blocks
        requests.append(TraceRequest(at_s, n_input, n_output, blocks))
    return requests
