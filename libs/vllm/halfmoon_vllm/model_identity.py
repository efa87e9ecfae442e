"""Name the model that keys and values are of: its checkpoint, and what vLLM makes of it.

Most models have the same keys and values in all engines. Those of which vLLM changes the weights
or the positions have a name of their own, so that their blocks are never mixed with others.
"""

import hashlib
from pathlib import Path
from typing import Any

from halfmoon_engine.checkpoints.fingerprint import fingerprint

#: Rotary embeddings whose keys vLLM computes for the longest context that a server allows, once
#: that is longer than the one that the model was first trained for.
_ROPES_OF_A_CONTEXT = frozenset({"longrope", "su", "dynamic"})
#: Models whose sliding window is a token wider in vLLM than in transformers.
_WIDER_WINDOWS = frozenset({"cohere2"})


def model_identity(folder: Path, model_config: Any) -> str:
    """Return a checkpoint's fingerprint, or another one where vLLM's KV is its own.

    Args:
        folder: of the checkpoint.
        model_config: vLLM's, verified.

    Raises:
        ModelError: the folder can't be read.
    """
    given = fingerprint(folder)
    changes = []
    quantization = getattr(model_config, "quantization", None)
    if quantization and not _is_quantised(model_config):
        changes.append(f"quantised as {quantization}")
    if kinds := _stretched_ropes(model_config):
        changes.append(f"{min(kinds)} for {model_config.max_model_len} tokens")
    if _has_wider_window(model_config):
        changes.append("a wider window")
    if not changes:
        return given
    return hashlib.sha256(" ".join([given, *changes]).encode()).hexdigest()[: len(given)]


def _has_wider_window(model_config: Any) -> bool:
    config = getattr(model_config, "hf_text_config", None)
    window = getattr(config, "sliding_window", None)
    is_one = getattr(config, "model_type", "") in _WIDER_WINDOWS
    return is_one and window is not None and bool(window < model_config.max_model_len)


def _is_quantised(model_config: Any) -> bool:
    """Return whether the checkpoint's own weights are quantised."""
    config = getattr(model_config, "hf_config", None)
    text_config = getattr(model_config, "hf_text_config", None)
    return any(getattr(each, "quantization_config", None) for each in (config, text_config))


def _stretched_ropes(model_config: Any) -> set[str]:
    """Return the types of rotary embeddings, of all kinds of layers, that depend on the context."""
    config = getattr(model_config, "hf_text_config", None)
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    parts = [found, *found.values()] if isinstance(found, dict) else []
    kinds = set()
    for part in parts:
        if not isinstance(part, dict):
            continue
        kind = str(part.get("rope_type") or part.get("type"))
        trained = part.get("original_max_position_embeddings") or 0
        if kind in _ROPES_OF_A_CONTEXT and trained < model_config.max_model_len:
            kinds.add(kind)
    return kinds
