"""Make the golden file of the seeded draw: the same seed gives the same tokens in mixed pools."""

from typing import Any

import msgspec

from halfmoon_protocol import seeded_draw
from halfmoon_protocol.sampling import Sampling


def golden_draws() -> dict[str, Any]:
    """Return numbers of seeds, weights of scores, and tokens that are chosen from logits.

    Logits are multiples of 1/1024, so their decimal digits are exact. Seeds are text: many
    readers of JSON cut numbers to 53 bits.
    """
    dice = [(0, 0), (0, 1), (7, 20), (2**63 - 1, 16_383), (11, 2**32)]
    scores = [(0.0, 1.0), (-0.5, 1.0), (-3.25, 0.7), (-22.5, 1.0), (-30.0, 1.0), (-1e30, 1e-6)]
    logits = [round(seeded_draw.uniform_draw(2, i) * 8192) / 1024 for i in range(48)]
    logits[5] = logits[40] = max(logits)  # of equal ones the lower token is the likelier
    history = [3, 5, 5, 9, 40, 40, 40]
    cases = [
        Sampling(temperature=0),
        Sampling(temperature=0, logit_bias=((5, -2.5), (40, -100.0))),
        Sampling(temperature=0, repetition_penalty=1.3, presence_penalty=0.5),
        Sampling(seed=11),
        Sampling(seed=11, temperature=0.7, top_p=0.9),
        Sampling(seed=12, temperature=1.5, top_k=5),
        Sampling(seed=13, temperature=2.0, min_p=0.3),
        Sampling(seed=14, temperature=3.0, top_k=20, top_p=0.5, min_p=0.05),
        Sampling(seed=15, temperature=1e-6),
        Sampling(seed=16, repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=0.4),
    ]
    return {
        "dice": [
            {
                "seed": str(seed),
                "position": position,
                "die": seeded_draw.uniform_draw(seed, position),
            }
            for seed, position in dice
        ],
        "weights": [
            {
                "score": score,
                "highest": 0.0,
                "temperature": temperature,
                "weight_times_2_33": int(seeded_draw.weigh(score, 0.0, temperature) * 2**33),
            }
            for score, temperature in scores
        ],
        "choices": {
            "logits": logits,
            "history": history,
            "n_prompt": 2,
            "first_position": len(history),
            "cases": [
                {
                    "sampling": msgspec.to_builtins(sampling),
                    "tokens": [
                        seeded_draw.choose_token(logits, sampling, position, history, 2)
                        for position in range(len(history), len(history) + 12)
                    ],
                }
                for sampling in cases
            ],
        },
    }
