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

TINY_VOCAB_SIZE = 384
TINY_MAX_CONTEXT = 8192
#: Window of the sliding layers, small enough for short prompts to exceed it.
TINY_SLIDING_WINDOW = 32
_COMMON = MappingProxyType(
    {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": TINY_MAX_CONTEXT,
        "bos_token_id": None,
        "eos_token_id": list(EOS_TOKEN_IDS),
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
)
_SLIDING = MappingProxyType(
    {
        "num_hidden_layers": 4,
        "sliding_window": TINY_SLIDING_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
)
#: Texts from which the tokenizer learns its merges.
_TEXTS = (
    "The moon rises over the harbour, and the tide comes in. ",
    "The moon is half in light and half in shadow, and the harbour is still. ",
    "A request comes in, its prompt is read, and the answer goes out word by word. ",
    "The prompt that was read before is not read again: its answer comes sooner. ",
)
#: Config class of transformers, and differences from `_COMMON`.
_ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ("LlamaConfig", {}),
        "qwen3": ("Qwen3Config", {"num_key_value_heads": 1}),
        "mistral": ("MistralConfig", {"sliding_window": TINY_SLIDING_WINDOW}),
        "gemma2": (
            "Gemma2Config",
            {
                **_SLIDING,
                "query_pre_attn_scalar": 16,
                "attn_logit_softcapping": 20.0,
                "final_logit_softcapping": 15.0,
            },
        ),
        "gemma3": ("Gemma3TextConfig", {**_SLIDING, "query_pre_attn_scalar": 16}),
    }
)
ARCHITECTURES = tuple(_ARCHITECTURES)


def make_tiny_model(arch: str, folder: Path, seed: int = 0) -> Path:
    """Write a tiny random model and its tokenizer into `folder`.

    Args:
        arch: one of `ARCHITECTURES`.
        folder: folder to create; existing files of these names are replaced.
        seed: equal seeds give equal files.

    Returns:
        `folder`.

    Raises:
        ValueError: the architecture is unknown.
    """
    limit_spin_waits()
    import torch
    import transformers as untyped_transformers

    transformers: Any = untyped_transformers
    if arch not in _ARCHITECTURES:
        raise ValueError(f"no tiny model of {arch!r}; there are {', '.join(ARCHITECTURES)}")
    config_class, changes = _ARCHITECTURES[arch]
    make_config: Callable[..., Any] = getattr(transformers, config_class)
    config = make_config(**{**_COMMON, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data += 0.2 * torch.randn_like(weight)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=list(EOS_TOKEN_IDS), pad_token_id=0
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(train_tokenizer(_TEXTS, TINY_VOCAB_SIZE), folder, max_context=TINY_MAX_CONTEXT)
    return folder
