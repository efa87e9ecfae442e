"""Pack a decoder's weights for the native extension, once for all decoders that use them.

An engine of all layers and its stages refer to the same packed weights. Each linear, embedding and
head is freed with the last of them. Norms are small: each decoder of the extension copies its own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfmoon_engine.attention.kv_pool import DTYPE_NAMES
from halfmoon_engine.interface import EngineStage
from halfmoon_engine.native.decoder_parts import DecoderParts, LayerParts, LinearPart, NormPart


@dataclass(frozen=True)
class PackedDecoder:
    """Layers of a model, or of its stage, as the extension takes them."""

    hidden: int
    #: Arguments of the extension's `Decoder` beside `embedding`, `head` and `final_norm`.
    shape: Mapping[str, Any]
    #: Memory of [n_vocab, hidden]; None: activations of the stage before are taken.
    embedding: Any
    #: A linear, or memory of the embedding; None, like the norm, before the last stage.
    head: Any
    final_norm: Any
    #: Place of the first of these layers among those of a page.
    first_layer: int
    #: Arguments of the extension's `Decoder.add_layer`, layer by layer.
    layers: tuple[Mapping[str, Any], ...]
    #: Each gives the cosines and sines, both [n, n_pairs], of the first n positions.
    angles: tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], ...]
    logit_scale: float
    logit_softcap: float | None
    max_context: int

    @property
    def rotates(self) -> bool:
        """Return whether any layer encodes positions by angles."""
        return any(layer["rope"] >= 0 for layer in self.layers)

    def cut(self, stage: EngineStage) -> "PackedDecoder":
        """Return what a stage of this decoder computes; nothing is copied."""
        return replace(
            self,
            embedding=self.embedding if stage.is_first else None,
            head=self.head if stage.is_last else None,
            final_norm=self.final_norm if stage.is_last else None,
            first_layer=stage.first_layer,
            layers=self.layers[stage.first_layer :][: stage.n_layers],
        )

    def weights(self) -> Iterator[Any]:
        """Yield the linears, and the memory of the embedding and of a head that is no linear."""
        yield from (part for part in (self.embedding, self.head) if part is not None)
        for layer in self.layers:
            yield from (layer[name] for name in ("qkv", "out", "up", "down"))


def pack_decoder(native: Any, parts: DecoderParts, max_context: int) -> PackedDecoder:
    """Pack the parts; the model's own weights are freed, each as soon as it is packed.

    Args:
        native: the extension's module.
        parts: of the model.
        max_context: tokens of the longest sequence.
    """
    # Copied, so that nothing keeps the checkpoint's mapped files in memory.
    embedding = None
    if parts.embedding is not None and (parts.embeds or parts.tied):
        embedding = parts.embedding.detach().clone()
    if parts.head is None:
        head = None
    elif parts.tied and embedding is not None:
        head = _memory(embedding)
    else:
        head = _pack(native, parts.head)
    dtype = DTYPE_NAMES[parts.dtype]
    return PackedDecoder(
        hidden=parts.hidden,
        shape={
            "hidden": parts.hidden,
            "n_heads": parts.n_heads,
            "n_kv_heads": parts.n_kv_heads,
            "head_dim": parts.head_dim,
            "n_pairs": parts.angles[0](2)[0].shape[-1],
            "n_vocab": parts.n_vocab,
            "embedding_dtype": dtype,
            "n_logits": parts.n_vocab if parts.head is None else parts.head.n_out,
            "head_dtype": dtype,
            "interleaved": parts.interleaved,
            "parallel": parts.parallel,
            "residual_multiplier": parts.residual_multiplier,
            "embedding_scale": parts.embedding_scale,
        },
        embedding=_memory(embedding) if parts.embeds and embedding is not None else None,
        head=head,
        final_norm=_norm(parts.final_norm),
        first_layer=parts.first_layer,
        layers=tuple(_pack_layer(native, layer) for layer in parts.layers),
        angles=parts.angles,
        logit_scale=parts.logit_scale,
        logit_softcap=parts.logit_softcap,
        max_context=max_context,
    )


def _pack_layer(native: Any, layer: LayerParts) -> Mapping[str, Any]:
    return {
        "norm": _norm(layer.norm),
        "qkv": _pack(native, layer.qkv),
        "q_norm": _norm(layer.q_norm),
        "k_norm": _norm(layer.k_norm),
        "rope": -1 if layer.rope is None else layer.rope,
        "scale": layer.scale,
        "window": layer.window or 0,
        "softcap": layer.softcap or 0.0,
        "sinks": None if layer.sinks is None else layer.sinks.float().contiguous().numpy(),
        "out": _pack(native, layer.out),
        "out_norm": _norm(layer.out_norm),
        "mlp_norm": _norm(layer.mlp_norm),
        "up": _pack(native, layer.up),
        "activation": layer.activation,
        "down": _pack(native, layer.down),
        "mlp_out_norm": _norm(layer.mlp_out_norm),
    }


def _pack(native: Any, part: LinearPart) -> Any:
    weights = part.weights().detach().contiguous()
    packed = native.Linear(
        _memory(weights),
        DTYPE_NAMES[weights.dtype],
        part.n_out,
        part.n_in,
        None if part.bias is None else part.bias.numpy(),
        part.gated,
    )
    part.release()
    return packed


def _memory(tensor: torch.Tensor) -> Any:
    """View a tensor's memory; numpy has no bfloat16.

    A file's header may end anywhere, and so may weights begin that are mapped: those are copied.
    """
    tensor = tensor.detach()
    if tensor.data_ptr() % tensor.element_size():
        tensor = tensor.clone()
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy()


def _norm(part: NormPart | None) -> Any:
    if part is None:
        return None
    bias = None if part.bias is None else part.bias.numpy()
    return (part.kind, part.weight.numpy(), bias, part.epsilon)
