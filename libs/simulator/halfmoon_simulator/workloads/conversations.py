"""A workload of conversations: each turn begins with the prompts and answers before it.

The lengths are chosen here, not measured. A cluster that keeps answers finds a turn's whole past in
its kvstores. One that does not computes each answer once more, with the turn behind it.
"""

import random

from halfmoon_simulator.workloads.traces import TRACE_BLOCK_TOKENS, TraceRequest

#: Turns of a conversation, least and most.
TURNS = (2, 8)
#: Tokens of the first message and of a later one, least and most; mean tokens of an answer.
FIRST_MESSAGE = (200, 6_000)
MESSAGE = (20, 800)
MEAN_OUTPUT = 600
#: Seconds between an answer's end and the next turn, least and most.
PAUSE_S = (5.0, 60.0)


def conversations(*, n_requests: int, rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Return so many turns; conversations begin at random, so that turns come at the given rate.

    Raises:
        ValueError: a number or a rate that is not above 0.
    """
    if rate_per_s <= 0 or n_requests < 1:
        raise ValueError(f"rate_per_s {rate_per_s} and n_requests {n_requests} must be above 0")
    dice = random.Random(f"conversations {seed}")
    requests: list[TraceRequest] = []
    begins_s, next_id = 0.0, 0
    while len(requests) < n_requests:
        begins_s += dice.expovariate(2 * rate_per_s / sum(TURNS))
        session = f"conversation-{len(requests)}"
        #: Ids of the full blocks so far, and tokens of prompts and answers so far.
        blocks: list[int] = []
        n_said = 0
        for turn in range(dice.randint(*TURNS)):
            n_input = n_said + dice.randint(*(MESSAGE if turn else FIRST_MESSAGE))
            n_full, n_rest = divmod(n_input, TRACE_BLOCK_TOKENS)
            while len(blocks) < n_full:
                blocks.append(next_id)
                next_id += 1
            partial = (next_id,) if n_rest else ()
            next_id += len(partial)
            n_output = max(2, round(dice.expovariate(1 / MEAN_OUTPUT)))
            at_s = dice.uniform(*PAUSE_S) if turn else begins_s
            prompt = (*blocks[:n_full], *partial)
            requests.append(TraceRequest(at_s, n_input, n_output, prompt, session))
            n_said = n_input + n_output
    return requests[:n_requests]
