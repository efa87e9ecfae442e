"""What transformers itself says, in one process alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Transformers:
    """A checkpoint in float32, whose answers no token ends."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None  # our requests ignore it

    def generate(self, prompt: Sequence[int], n_new: int) -> list[int]:
        out = self._model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=n_new, pad_token_id=0
        )
        return [int(token) for token in out[0, len(prompt) :]]

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """What it thinks of each token after those before it."""
        logprobs: torch.Tensor = self._model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return logprobs

    def require_greedy(self, prompt: Sequence[int], tokens: Sequence[int], n_new: int) -> None:
        """Each token is the likeliest one after those before it: `generate`, in one pass."""
        assert len(tokens) == n_new
        likeliest = self.logprobs([*prompt, *tokens[:-1]]).argmax(-1)
        assert likeliest[len(prompt) - 1 :].tolist() == list(tokens)
