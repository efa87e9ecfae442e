"""Refuse models that write no text, or keep other state than keys and values, by their config.

A list is never complete. The engine checks unknown types by their transformers configuration
(`architecture.check_architecture`), then by their behaviour (`attention_probe.probe_attention`).
"""

from collections.abc import Mapping
from typing import Any

from halfmoon_models.config_parts import nested_parts, text_parts
from halfmoon_models.errors import BrokenCheckpoint, UnsupportedModel, one_line
from halfmoon_models.model_types import (
    AUDIO,
    ENCODER_DECODERS,
    ENCODERS,
    LATENT,
    OTHER_STATE,
    PAGEABLE_LAYERS,
    SHARED_KEYS,
    VISION,
)

_SERVED = (
    "served are decoder-only language models whose layers all keep keys and values of one shape"
)
_DYNAMIC = "dynamic rotary scaling turns old keys by the longest sequence in the batch"
#: Parts of a configuration that read something else than text, and what they read.
_OTHER_INPUTS = {
    "vision_config": "images",
    "vq_config": "images",
    "video_config": "videos",
    "audio_config": "sounds",
    "speech_config": "sounds",
}
#: Endings of class names in `architectures`, and the task of such a model.
_HEADS = (
    ("ForMaskedLM", "fills gaps in a text (it is an encoder)"),
    ("ForSequenceClassification", "sorts texts into classes, or scores them"),
    ("ForTokenClassification", "sorts words into classes"),
    ("ForQuestionAnswering", "marks a piece of a given text"),
    ("ForMultipleChoice", "chooses among given texts"),
    ("ForNextSentencePrediction", "sorts texts into classes"),
    ("RewardModel", "scores texts (a reward model)"),
    ("ForScore", "scores texts (a reward model)"),
    ("ForRetrieval", "embeds texts"),
    ("ForEmbedding", "embeds texts"),
    ("EmbeddingModel", "embeds texts"),
    ("ForTextEncoding", "embeds texts"),
    ("ForImageClassification", "sorts images into classes"),
    ("ForObjectDetection", "finds things in images"),
    ("ForAudioClassification", "sorts sounds into classes"),
    ("ForCTC", "recognises speech"),
    ("ForSpeechSeq2Seq", "recognises speech"),
)


def check_kind(config: Mapping[str, Any]) -> str:
    """Refuse the configuration of a model that can't be served; return its model type.

    Raises:
        BrokenCheckpoint: it names no model type.
        UnsupportedModel: naming the type and the reason.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise BrokenCheckpoint(
            "config.json names no model_type: not a configuration of transformers; fetch the "
            "model's transformers version"
        )
    _refuse_code(config)
    if config.get("is_encoder_decoder") is True or kind in ENCODER_DECODERS:
        raise unsupported_kind(kind, "it is an encoder-decoder")
    if kind in AUDIO:
        raise unsupported_kind(kind, "it is a model of sounds")
    if kind in VISION:
        raise unsupported_kind(kind, "it is a model of images")
    if kind in ENCODERS and config.get("is_decoder") is not True:
        raise unsupported_kind(kind, "it is an encoder, which reads texts and writes none")
    if kind in OTHER_STATE:
        raise unsupported_kind(kind, OTHER_STATE[kind])
    _refuse_heads(kind, config.get("architectures"))
    _refuse_attention(kind, config)
    return kind


def unserved_inputs(config: Mapping[str, Any]) -> str:
    """Say in one line which inputs of a multimodal model are not served; "" if it reads text only.

    Args:
        config: a configuration that `check_kind` let through.
    """
    parts = [part for _, part in text_parts(config)]
    there = [
        name for name in _OTHER_INPUTS if any(isinstance(part.get(name), dict) for part in parts)
    ]
    if not there:
        return ""
    inputs = sorted({_OTHER_INPUTS[part] for part in there})
    return (
        f"Of a model of type {one_line(config.get('model_type'), 60)!r}, text is served alone: "
        f"requests with {' or '.join(inputs)} are refused ({', '.join(there)} in config.json)."
    )


def _refuse_heads(kind: str, architectures: Any) -> None:
    """Refuse a model by the class names of its saved weights."""
    if not isinstance(architectures, list):
        return
    for name in architectures:
        if not isinstance(name, str):
            continue
        shown = one_line(name, 80)
        for ending, does in _HEADS:
            if name.endswith(ending):
                raise unsupported_kind(kind, f"as {shown} (architectures in config.json) it {does}")
        if name.endswith("Model") and not name.endswith("HeadModel"):
            raise unsupported_kind(
                kind,
                f"saved as {shown} (architectures in config.json) it has no head to write with, "
                "as models that embed texts have none",
            )


def _refuse_attention(kind: str, config: Mapping[str, Any]) -> None:
    for _, part in text_parts(config):
        if reason := _other_shapes(part):
            raise unsupported_kind(kind, reason)
        if part.get("use_bidirectional_attention") or part.get("is_causal") is False:
            raise unsupported_kind(kind, "its attention looks at later tokens")
        types = part.get("layer_types")
        named = {one for one in types if isinstance(one, str)} if isinstance(types, list) else set()
        if odd := sorted(named - PAGEABLE_LAYERS):
            listed = ", ".join(one_line(one, 60) for one in odd[:5])
            raise unsupported_kind(kind, f"its layers of type {listed} keep another kind of state")
        for key in ("rope_parameters", "rope_scaling"):
            rope = part.get(key)
            ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
            for one in ropes:
                if isinstance(one, dict) and "dynamic" in (one.get("rope_type"), one.get("type")):
                    raise unsupported_kind(kind, _DYNAMIC)


def _other_shapes(part: Mapping[str, Any]) -> str:
    """Return the reason if layers keep anything but keys and values of one shape; "" if not."""
    if part.get("kv_lora_rank"):
        return LATENT
    if part.get("num_kv_shared_layers"):
        return SHARED_KEYS
    size = part.get("head_dim")
    for field in ("global_head_dim", "v_head_dim", "swa_head_dim"):
        other = part.get(field)
        if isinstance(size, int) and isinstance(other, int) and size != other:
            return f"it keeps heads of several sizes (head_dim {size}, {field} {other})"
    return ""


def _refuse_code(config: Mapping[str, Any]) -> None:
    """Refuse fields that would have transformers fetch code, or read other weights."""
    if config.get("transformers_weights") is not None:
        raise UnsupportedModel(
            f"config.json names {one_line(config['transformers_weights'], 80)!r} as the weights "
            "(transformers_weights); served is model.safetensors or what its index names: remove "
            "the field"
        )
    for prefix, part in nested_parts(config):
        for key, value in part.items():
            field = one_line(f"{prefix}{key}", 80)
            # One name, or an object of names by the parts that they are for.
            names = list(value.values()) if isinstance(value, dict) else [value]
            for name in names if "implementation" in key else ():
                if isinstance(name, str) and not name.isidentifier():
                    raise UnsupportedModel(
                        f"config.json asks for {field} {one_line(name, 80)!r}, which is code from "
                        "elsewhere and never run: remove the field"
                    )
            if isinstance(value, str) and _leads_to_other_models(key, value):
                raise UnsupportedModel(
                    f"config.json names {one_line(value, 80)!r} as {field}, which is fetched from "
                    "elsewhere or read from another file, and never here: remove the field"
                )


def _leads_to_other_models(key: str, value: str) -> bool:
    """Tell whether a field would have transformers or timm find another model by its name.

    A `backbone` is asked of the hub. timm knows an `architecture` by a plain name, and else finds
    it by the scheme before a colon. A `checkpoint_path` is opened as it stands.
    """
    if key == "architecture":
        return ":" in value or "/" in value
    return key in ("backbone", "checkpoint_path")


def unsupported_kind(kind: str, reason: str) -> UnsupportedModel:
    """Return the refusal of a model type, with the reason and what is served."""
    return UnsupportedModel(
        f"a model of type {one_line(kind, 60)!r} (model_type in config.json) can't be served: "
        f"{reason}; {_SERVED}: choose one of these"
    )
