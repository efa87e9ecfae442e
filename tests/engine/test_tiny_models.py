"""Tiny models can show a fault: each of their weights matters, and so does the context."""

from typing import Any

import pytest
import torch
import transformers as untyped_transformers

from halfmoon_testing.models.tiny_models import ARCHITECTURES
from tests.engine.driver import Tiny, prompt_of

transformers: Any = untyped_transformers


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_without_one_of_its_weights_is_another_model(arch: str, tiny: Tiny) -> None:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny(arch), attn_implementation="eager"
    )
    tokens = torch.tensor([prompt_of(100)])
    with torch.inference_mode():
        whole = model(tokens).logits
        for name, weight in model.named_parameters():
            kept = weight.data
            weight.data = torch.ones_like(kept) if is_norm_weight(name) else torch.zeros_like(kept)
            changed = model(tokens).logits
            weight.data = kept
            moved = float((changed - whole).square().mean().sqrt() / whole.std())
            assert moved > 0.01, f"{name} of {arch} moves logits by {moved:.2g} of their spread"


def is_norm_weight(name: str) -> bool:
    return name.endswith("weight") and ("norm" in name or ".ln_" in name)
