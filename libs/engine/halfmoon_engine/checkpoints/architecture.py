"""Refuse models that a paged KV pool can't hold, by their transformers configuration.

Such a refusal names the reason and costs nothing. `attention_probe.probe_attention` checks the
loaded model for all that a configuration does not tell.
"""

from typing import Any

from halfmoon_models.model_kinds import unsupported_kind
from halfmoon_models.model_types import LATENT, PAGEABLE_LAYERS, SHARED_KEYS


def check_architecture(config: Any) -> None:
    """Refuse a model by its transformers config.

    Raises:
        UnsupportedModel: naming the model type and the reason.
    """
    text = config.get_text_config(decoder=True)
    kind = str(config.model_type)

    def refuse(reason: str) -> None:
        raise unsupported_kind(kind, reason)

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    if not isinstance(getattr(text, "num_attention_heads", None), int):
        refuse("its layers have no attention heads, or not equally many")
    odd_layers = set(getattr(text, "layer_types", None) or ()) - PAGEABLE_LAYERS
    if odd_layers:
        refuse(f"its layers of type {', '.join(sorted(odd_layers))} keep another kind of state")
    if getattr(text, "num_kv_shared_layers", 0):
        refuse(SHARED_KEYS)
    if getattr(text, "kv_lora_rank", None):
        refuse(LATENT)
    if getattr(text, "use_bidirectional_attention", False) or not getattr(text, "is_causal", True):
        refuse("its attention looks at later tokens")
    if "dynamic" in _rope_types(text):
        refuse("dynamic rotary scaling turns old keys by the longest sequence in the batch")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(text, cap, None) == 0:
            refuse(f"its {cap} is 0, which makes all scores equal; null is none")
    if not isinstance(getattr(text, "max_position_embeddings", None), int):
        refuse("its config names no longest context (max_position_embeddings)")


def max_context(config: Any) -> int:
    """Return the tokens of the longest sequence whose keys keep their rotation."""
    text = config.get_text_config(decoder=True)
    longest = int(text.max_position_embeddings)
    if "longrope" in _rope_types(text):
        # Beyond its original length this scaling swaps all frequencies, those of old keys too.
        for rope in _ropes(text):
            longest = min(longest, int(rope.get("original_max_position_embeddings", longest)))
    return longest


def _ropes(text: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters of a config: one set, or one per type of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    return nested or [rope]


def _rope_types(text: Any) -> set[str]:
    return {str(rope.get("rope_type", "default")) for rope in _ropes(text)}
