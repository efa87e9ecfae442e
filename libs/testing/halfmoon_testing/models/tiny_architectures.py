"""List the architectures of the tiny models: what each adds to a plain Llama, in small numbers.

Together they have head sizes that no vector width divides, and one to eight query heads for a KV
head. Rotary embeddings turn whole heads, parts, or none. Some have sliding windows, soft caps,
sinks, biases, experts, parallel layers, or tied heads.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from halfmoon_testing.models.byte_tokenizer import EOS_TOKEN_IDS

TINY_VOCAB_SIZE = 384
TINY_MAX_CONTEXT = 8192
#: Window of the sliding layers, small enough for short prompts to exceed it.
TINY_SLIDING_WINDOW = 32
#: Fields of all configurations. Head size is 16 where an architecture does not say otherwise.
COMMON = MappingProxyType(
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
_EXPERTS = MappingProxyType(
    {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
)
#: Rotary frequencies of a model whose context was extended from half its length.
_LONG_ROPE = MappingProxyType(
    {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": TINY_MAX_CONTEXT // 2,
        "short_factor": [1.0 + i / 36 for i in range(36)],
        "long_factor": [2.0 + i / 36 for i in range(36)],
    }
)
_YARN = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 2.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": TINY_MAX_CONTEXT // 2,
    }
)
#: Config class of transformers, and differences from `COMMON`.
TINY_ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ("LlamaConfig", {}),
        # Biases of queries, keys and values; heads of 40.
        "qwen2": ("Qwen2Config", {"hidden_size": 160, "head_dim": 40}),
        # Norms of each head's queries and keys.
        "qwen3": ("Qwen3Config", {"num_key_value_heads": 1}),
        "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 40, "norm_topk_prob": True}),
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
        # Packed projections, heads of 96 of which 72 turn, frequencies of a long context.
        "phi3": (
            "Phi3Config",
            {
                "hidden_size": 192,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 96,
                "sliding_window": TINY_SLIDING_WINDOW,
                "rope_parameters": dict(_LONG_ROPE),
            },
        ),
        # Norms after attention and MLP, and of all queries and keys.
        "olmo2": ("Olmo2Config", {"hidden_size": 160, "head_dim": 40}),
        # Layer norms, a bias everywhere, an MLP without a gate, three heads to a KV head.
        "starcoder2": (
            "Starcoder2Config",
            {
                "hidden_size": 192,
                "num_attention_heads": 6,
                "head_dim": 32,
                "sliding_window": TINY_SLIDING_WINDOW,
                "tie_word_embeddings": True,
            },
        ),
        # Multipliers of embeddings, scores, residuals and logits; eight heads to a KV head.
        "granite": (
            "GraniteConfig",
            {
                "hidden_size": 128,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "embedding_multiplier": 6.0,
                "attention_multiplier": 0.1,
                "residual_multiplier": 0.5,
                "logits_scaling": 0.25,
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
            },
        ),
        # Attention beside the MLP, interleaved projections, heads of 80 of which 20 turn.
        "gpt_neox": (
            "GPTNeoXConfig",
            {"hidden_size": 160, "num_attention_heads": 2, "rotary_pct": 0.25},
        ),
        # Pairs of neighbours turn, in half of a head of 80.
        "glm": ("GlmConfig", {"head_dim": 80, "attention_bias": True}),
        "glm4": ("Glm4Config", {"head_dim": 40, "attention_bias": True}),
        # Layer norms without a bias, attention beside the MLP, norms of queries and keys.
        "cohere": (
            "CohereConfig",
            {
                "hidden_size": 160,
                "head_dim": 40,
                "use_qk_norm": True,
                "logit_scale": 2.0,
                "tie_word_embeddings": True,
            },
        ),
        # The same, without positions in its full layers.
        "cohere2": ("Cohere2Config", {**_SLIDING, "logit_scale": 2.0, "tie_word_embeddings": True}),
        # Sinks, experts with biases, frequencies of YaRN.
        "gpt_oss": (
            "GptOssConfig",
            {
                **_SLIDING,
                "head_dim": 64,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "rope_parameters": dict(_YARN),
            },
        ),
        # Positions that are learnt, and no rotary embedding.
        "gpt2": (
            "GPT2Config",
            {"n_embd": 80, "n_head": 2, "n_layer": 3, "n_positions": TINY_MAX_CONTEXT},
        ),
    }
)
