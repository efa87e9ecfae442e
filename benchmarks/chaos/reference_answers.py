"""Make prompts with shared prefixes, and compute their greedy answers with transformers itself."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from halfmoon_testing.models.tiny_architectures import TINY_VOCAB_SIZE

#: Tokens of an answer at the most.
MOST_TOKENS = 200
#: An answer ends before a token whose logit leads by less: another sum may choose the other one.
_LEAST_LEAD = 1e-3
_N_PREFIXES, _N_PROMPTS = 6, 24
_PREFIX_TOKENS = (48, 900)
_OWN_TOKENS = (1, 200)
#: First id that is no special token.
_FIRST_TOKEN = 10


@dataclass(frozen=True)
class Question:
    """A prompt, and its right answer as far as it is certain."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def make_questions(model: Path, seed: int) -> list[Question]:
    """Draw prompts from a seed, and compute the answers; takes half a minute or more."""
    dice = random.Random(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(
            dice.choices(range(_FIRST_TOKEN, TINY_VOCAB_SIZE), k=dice.randint(least, most))
        )

    prefixes = [tokens(*_PREFIX_TOKENS) for _ in range(_N_PREFIXES)]
    prompts = [dice.choice(prefixes) + tokens(*_OWN_TOKENS) for _ in range(_N_PROMPTS)]
    torch.set_num_threads(1)  # several wait for each other longer than they compute
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.generation_config.eos_token_id = None  # our requests ignore it
    return [Question(prompt, _answer(loaded, prompt)) for prompt in prompts]


def _answer(model: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    out = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=MOST_TOKENS,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    chosen = out.sequences[0, len(prompt) :].tolist()
    certain: list[int] = []
    for token, logits in zip(chosen, out.logits, strict=True):
        best, second = logits[0].topk(2).values.tolist()
        if certain and best - second < _LEAST_LEAD:
            break
        certain.append(token)
    return tuple(certain)
