"""Read a transformers model into the parts of a native decoder.

Each family says where its parts lie and what is odd about them. `native_runner` compares the parts
with the model itself before they serve. So a family that changes falls back to torch and never
gives wrong tokens.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from halfmoon_engine.attention.forward_plan import SeenAttention
from halfmoon_engine.native.decoder_parts import DecoderParts, LayerParts, LinearPart, NormPart
from halfmoon_engine.stages.stage_model import StageModel


class NotNative(Exception):
    """The extension has no form for this model; torch computes it."""


@dataclass(frozen=True)
class _Family:
    """Places of a model type's parts; None where it has no such part."""

    norm: str | None = "input_layernorm"
    out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    #: Added to the weights of root mean square norms.
    norm_offset: float = 0.0
    interleaved: bool = False
    parallel: bool = False


_LLAMA = _Family()
_GEMMA2 = _Family(
    out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    norm_offset=1.0,
)
_COHERE = _Family(mlp_norm=None, interleaved=True, parallel=True)

#: By transformers' model type.
FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "ministral": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": _LLAMA,
        "phi3": _LLAMA,
        "granite": _LLAMA,
        "starcoder2": _LLAMA,
        "smollm3": _LLAMA,
        "gemma": _Family(norm_offset=1.0),
        "gemma2": _GEMMA2,
        "gemma3_text": _GEMMA2,
        "olmo2": _Family(
            norm=None,
            out_norm="post_attention_layernorm",
            mlp_norm=None,
            mlp_out_norm="post_feedforward_layernorm",
        ),
        "glm": _Family(interleaved=True),
        "glm4": _Family(
            out_norm="post_self_attn_layernorm",
            mlp_out_norm="post_mlp_layernorm",
            interleaved=True,
        ),
        "cohere": _COHERE,
        "cohere2": _COHERE,
        "gpt_neox": _LLAMA,
    }
)

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def read_decoder(staged: StageModel, seen: Mapping[int, SeenAttention]) -> DecoderParts:
    """Read the parts of a model, or of a stage.

    Args:
        staged: on the CPU, probed.
        seen: how each of its layers called attention in the probe.

    Raises:
        NotNative: a model type, or a part of it, that the extension has no form for.
    """
    model, stage = staged.model, staged.stage
    config = model.config
    family = FAMILIES.get(str(config.model_type))
    if family is None:
        raise NotNative(f"models of type {config.model_type} have no native form")
    base = model.base_model
    embedding = _first(base, "embed_tokens", "embed_in")
    weights = getattr(embedding, "weight", None)
    head = model.get_output_embeddings() if stage.is_last else None
    first = staged.first_layer
    try:
        layers = tuple(
            _read_layer(config, family, base.layers[i], seen[i - first], _rope_of(config, base, i))
            for i in range(first, first + len(seen))
        )
        final_norm = _norm(_first(base, "norm", "final_layer_norm"), family)
        return DecoderParts(
            hidden=int(config.hidden_size),
            n_heads=int(config.num_attention_heads),
            n_kv_heads=seen[0].n_kv_heads,
            head_dim=seen[0].head_dim,
            first_layer=first,
            layers=layers,
            dtype=model.dtype if weights is None else weights.dtype,
            n_vocab=int(embedding.num_embeddings),
            embedding=weights,
            embeds=stage.is_first,
            embedding_scale=_embedding_scale(config, embedding) if stage.is_first else 1.0,
            final_norm=None if head is None else final_norm,
            head=None if head is None else _linear([head]),
            tied=head is not None
            and weights is not None
            and head.weight.data_ptr() == weights.data_ptr(),
            parallel=family.parallel or bool(getattr(config, "use_parallel_residual", False)),
            interleaved=family.interleaved,
            residual_multiplier=float(getattr(config, "residual_multiplier", 1.0)),
            logit_scale=_logit_scale(config),
            logit_softcap=getattr(config, "final_logit_softcapping", None),
            angles=tuple(_angles(base.rotary_emb, kind) for kind in _rope_kinds(config, base)),
        )
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise NotNative(f"its parts are not where they are looked for: {error}") from error


def _read_layer(
    config: Any, family: _Family, layer: Any, seen: SeenAttention, rope: int
) -> LayerParts:
    attention = _first(layer, "self_attn", "attention")
    mlp = layer.mlp
    return LayerParts(
        norm=_norm_of(layer, family.norm, family),
        qkv=_read_qkv(attention, seen),
        q_norm=_norm_of(attention, "q_norm", family, optional=True),
        k_norm=_norm_of(attention, "k_norm", family, optional=True),
        rope=rope if _rotates(config, attention, seen) else None,
        scale=seen.scale,
        window=seen.window,
        softcap=seen.softcap,
        sinks=seen.sinks,
        out=_linear([_first(attention, "o_proj", "dense")]),
        out_norm=_norm_of(layer, family.out_norm, family),
        mlp_norm=_norm_of(layer, family.mlp_norm, family),
        up=_read_up(mlp),
        activation=_activation(config),
        down=_linear([_first(mlp, "down_proj", "c_proj", "dense_4h_to_h")]),
        mlp_out_norm=_norm_of(layer, family.mlp_out_norm, family),
    )


def _first(module: Any, *names: str) -> Any:
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise NotNative(f"{type(module).__name__} has no {' or '.join(names)}")


def _rotates(config: Any, attention: Any, seen: SeenAttention) -> bool:
    if config.model_type == "cohere2":
        return seen.window is not None
    return bool(getattr(attention, "use_rope", True))


def _activation(config: Any) -> str:
    named = getattr(config, "hidden_activation", None) or config.hidden_act
    if named not in _ACTIVATIONS:
        raise NotNative(f"its activation {named} has no native form")
    return _ACTIVATIONS[named]


def _embedding_scale(config: Any, embedding: Any) -> float:
    scale = getattr(embedding, "embed_scale", None)
    if scale is not None:
        return float(scale.to(embedding.weight.dtype))
    return float(getattr(config, "embedding_multiplier", 1.0))


def _logit_scale(config: Any) -> float:
    if config.model_type == "granite":
        return 1.0 / float(config.logits_scaling)
    return float(getattr(config, "logit_scale", 1.0))


# Norms


def _norm_of(
    module: Any, name: str | None, family: _Family, optional: bool = False
) -> NormPart | None:
    if name is None:
        return None
    if optional and getattr(module, name, None) is None:
        return None
    return _norm(getattr(module, name), family)


def _norm(module: Any, family: _Family) -> NormPart:
    kind = type(module).__name__
    epsilon = _first(module, "variance_epsilon", "eps")
    weight = module.weight.detach().float().contiguous()
    bias = getattr(module, "bias", None)
    if isinstance(module, torch.nn.LayerNorm) or kind.endswith("LayerNorm"):
        return NormPart("layer", weight, None if bias is None else _floats(bias), float(epsilon))
    if not kind.endswith("RMSNorm"):
        raise NotNative(f"its norms are {kind}")
    return NormPart("rms", weight + family.norm_offset, None, float(epsilon))


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().contiguous()


# Linears


def _linear(modules: Sequence[Any], gated: bool = False) -> LinearPart:
    """Stack linears over the same input."""
    for module in modules:
        if type(module) is not torch.nn.Linear:
            raise NotNative(f"a linear is a {type(module).__name__}")
    biases = [module.bias for module in modules]
    bias: torch.Tensor | None = None
    if any(each is not None for each in biases):
        bias = torch.cat(
            [
                torch.zeros(module.out_features) if module.bias is None else _floats(module.bias)
                for module in modules
            ]
        )

    def stacked() -> torch.Tensor:
        # Read when it is packed: nothing here may keep a model's weights in memory.
        weights: list[torch.Tensor] = [module.weight for module in modules]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    return LinearPart(
        weights=stacked,
        bias=bias,
        n_out=sum(module.out_features for module in modules),
        n_in=modules[0].in_features,
        gated=gated,
        release=lambda: _release(modules),
    )


def _release(modules: Sequence[Any]) -> None:
    for module in modules:
        module.weight = None


def _read_up(mlp: Any) -> LinearPart:
    if hasattr(mlp, "gate_proj"):
        return _linear([mlp.gate_proj, mlp.up_proj], gated=True)
    if hasattr(mlp, "gate_up_proj"):
        return _linear([mlp.gate_up_proj], gated=True)
    return _linear([_first(mlp, "c_fc", "dense_h_to_4h")])


def _read_qkv(attention: Any, seen: SeenAttention) -> LinearPart:
    if hasattr(attention, "q_proj"):
        return _linear([attention.q_proj, attention.k_proj, attention.v_proj])
    if hasattr(attention, "qkv_proj"):
        return _linear([attention.qkv_proj])
    # GPT-NeoX: rows of queries, keys and values head by head.
    mixed = _linear([attention.query_key_value])
    shape = (seen.n_kv_heads, 3, seen.head_dim)

    def by_side(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(*shape, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    return LinearPart(
        weights=lambda: by_side(mixed.weights()),
        bias=None if mixed.bias is None else by_side(mixed.bias),
        n_out=mixed.n_out,
        n_in=mixed.n_in,
        release=mixed.release,
    )


# Positions


def _rope_kinds(config: Any, base: Any) -> tuple[str | None, ...]:
    """Return the types of layers that have angles of their own; (None,) where all share them."""
    if "layer_type" not in inspect.signature(base.rotary_emb.forward).parameters:
        return (None,)
    return tuple(sorted(set(config.layer_types)))


def _rope_of(config: Any, base: Any, layer: int) -> int:
    kinds = _rope_kinds(config, base)
    return 0 if kinds == (None,) else kinds.index(config.layer_types[layer])


def _angles(rotary: Any, kind: str | None) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that gives the cosines and sines of the first n positions."""
    options = {} if kind is None else {"layer_type": kind}

    def angles(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(n)[None]
        cosines, sines = rotary(torch.zeros(1, dtype=torch.float32), positions, **options)
        # Each angle stands twice: side by side where pairs are neighbours, else in both halves.
        half = cosines.shape[-1] // 2
        doubled = n > 1 and half > 1 and bool((cosines[0, :, 0::2] == cosines[0, :, 1::2]).all())
        picked = slice(0, None, 2) if doubled else slice(0, half)
        return (
            cosines[0, :, picked].float().contiguous(),
            sines[0, :, picked].float().contiguous(),
        )

    return angles
