"""Make tiny random models of several architectures, for tests of engines.

Each is a folder of standard files, tokenizer included, that transformers loads. Weights are spread
so that greedy output varies over the vocabulary and has no near-ties. So two correct computations
in float32 choose the same tokens.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from halfmoon_engine.torch_threads import limit_spin_waits
from halfmoon_testing.models.byte_tokenizer import EOS_TOKEN_IDS, train_tokenizer, write_tokenizer
from halfmoon_testing.models.tiny_architectures import (
    COMMON,
    TINY_ARCHITECTURES,
    TINY_MAX_CONTEXT,
    TINY_VOCAB_SIZE,
)

#: Texts from which the tokenizer learns its merges.
_TEXTS = (
    "The moon rises over the harbour, and the tide comes in. ",
    "The moon is half in light and half in shadow, and the harbour is still. ",
    "A request comes in, its prompt is read, and the answer goes out word by word. ",
    "The prompt that was read before is not read again: its answer comes sooner. ",
)
ARCHITECTURES = tuple(TINY_ARCHITECTURES)
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


def make_tiny_model(
    arch: str, folder: Path, seed: int = 0, fields: Mapping[str, Any] = _NO_FIELDS
) -> Path:
    """Write a tiny random model and its tokenizer into `folder`.

    Args:
        arch: one of `ARCHITECTURES`.
        folder: folder to create; existing files of these names are replaced.
        seed: equal seeds give equal files.
        fields: of the configuration, in place of the architecture's own.

    Returns:
        `folder`.

    Raises:
        ValueError: the architecture is unknown.
    """
    limit_spin_waits()
    import torch
    import transformers as untyped_transformers

    transformers: Any = untyped_transformers
    if arch not in TINY_ARCHITECTURES:
        raise ValueError(f"no tiny model of {arch!r}; there are {', '.join(ARCHITECTURES)}")
    config_class, changes = TINY_ARCHITECTURES[arch]
    make_config: Callable[..., Any] = getattr(transformers, config_class)
    config = make_config(**{**COMMON, **changes, **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if "sinks" in name:
                weight.data = 2 + torch.randn_like(weight)
            elif weight.dim() == 1 or "norm" in name or "bias" in name:
                # Fresh norms are 1 and fresh biases 0: a model without them would be the same.
                weight.data += 0.2 * torch.randn_like(weight)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=list(EOS_TOKEN_IDS), pad_token_id=0
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(train_tokenizer(_TEXTS, TINY_VOCAB_SIZE), folder, max_context=TINY_MAX_CONTEXT)
    return folder
