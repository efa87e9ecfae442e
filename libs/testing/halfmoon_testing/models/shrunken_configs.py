"""Shrink the default configuration of any model type of transformers to a tiny one.

Sizes are found by the names that most types give them. What a type needs beside them stands in
`_OF_TYPES`. A tower of images or sounds is shrunk as well.
"""

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SHRUNKEN_VOCAB_SIZE = 384
_N_LAYERS = 2
_SIZES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(
            ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "projection_dim"), 64
        ),
        **dict.fromkeys(("out_hidden_size", "output_dim", "vision_output_dim"), 64),
        **dict.fromkeys(("text_hidden_size", "audio_hidden_size"), 64),
        **dict.fromkeys(("intermediate_size", "ffn_dim"), 96),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "expert_ffn_hidden_size"), 96),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
        **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), _N_LAYERS),
        **dict.fromkeys(("depth", "encoder_layers", "decoder_layers"), _N_LAYERS),
        **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "attention_heads"), 4),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("head_dim", "attention_head_dim"), 16),
        **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
        **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "moe_num_experts": 4,
        "moe_k": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_start_index": 0,
        "n_group": 1,
        "topk_group": 1,
        "num_global_layers": 1,
        "image_size": 28,
        "patch_size": 14,
        "n_filters": 4,
        "num_filters": 2,
        "vocab_size": SHRUNKEN_VOCAB_SIZE,
    }
)
_ROPE = MappingProxyType({"rope_type": "default", "rope_theta": 10_000.0})
#: Rotary parameters of three coordinates, which are equal for text.
_MROPE = MappingProxyType({"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}})
_HALF_MROPE = MappingProxyType(
    {
        "rope_parameters": {
            **_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5
        }
    }
)  # fmt: skip
_THREE_COORDINATES = (
    "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "paddleocr_vl", "glm4v", "glm46v", "glm_ocr",
    "glmga",
)  # fmt: skip
#: What types need beside their sizes.
_OF_TYPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **{kind: {"text_config": _MROPE} for kind in _THREE_COORDINATES},
        "glm4v_moe": {"text_config": _HALF_MROPE},
        "ernie4_5_vl_moe": {
            "text_config": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}}
        },
        "qwen2_5_omni": {"thinker_config": {"text_config": _MROPE}},
        "step3p7": {"text_config": {"sliding_window": 32}},
        "mimo_v2_flash": {"v_head_dim": 8},
    }
)


def shrunken_config(kind: str) -> Any:
    """Return a tiny configuration of a model type, of transformers' own class.

    Raises:
        Exception: of transformers, where the type has sizes of other names that must fit.
    """
    import transformers as untyped_transformers

    transformers: Any = untyped_transformers
    config_class = transformers.CONFIG_MAPPING[kind]
    fields = _shrink(config_class().to_dict())
    _merge(fields, _OF_TYPES.get(kind, {}))
    left_out = ("model_type", "id2label", "label2id", "transformers_version")
    return config_class(**{key: value for key, value in fields.items() if key not in left_out})


def _shrink(fields: Mapping[str, Any]) -> dict[str, Any]:
    n_layers = fields.get("num_hidden_layers")
    return {
        key: _shrunk(key, value, n_layers)
        for key, value in fields.items()
        if key != "per_layer_config"
    }


def _shrunk(key: str, value: Any, n_layers: Any) -> Any:
    if isinstance(value, dict):
        inner = _shrink(value) if all(isinstance(each, str) for each in value) else dict(value)
        return {**inner, "mrope_section": [2, 3, 3]} if "mrope_section" in inner else inner
    if isinstance(value, list) and value and len(value) == n_layers:
        return [_shrunk(key, each, None) for each in value[:_N_LAYERS]]
    if key in _SIZES and isinstance(value, int) and not isinstance(value, bool):
        return _SIZES[key]
    if key in ("head_dim", "num_key_value_heads"):
        return _SIZES[key] if value is None else value
    if key.endswith(("token_id", "token_index")):
        return _token(key, value)
    return value


def _token(key: str, value: Any) -> Any:
    """Return a token of the small vocabulary, for special tokens that lie behind it."""
    if isinstance(value, list):
        return [_token(key, each) for each in value]
    if isinstance(value, int) and value >= SHRUNKEN_VOCAB_SIZE:
        return SHRUNKEN_VOCAB_SIZE - 1 - sum(map(ord, key)) % 80
    return value


def _merge(fields: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(fields.get(key), dict):
            _merge(fields[key], value)
        else:
            fields[key] = copy.deepcopy(dict(value) if isinstance(value, Mapping) else value)
