"""Describe a decoder's parts as the native extension takes them.

All tensors are on the CPU. Weights keep the checkpoint's type; norms and biases are float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class NormPart:
    """A norm: x·weight/rms(x), or the same of x less its mean, with a bias."""

    kind: Literal["rms", "layer"]
    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float


@dataclass(frozen=True)
class LinearPart:
    """Rows of one or several linears over the same input, one after the other."""

    #: Called once, when the part is packed: [n_out, n_in].
    weights: Callable[[], torch.Tensor]
    bias: torch.Tensor | None
    n_out: int
    n_in: int
    #: Frees the model's own weights.
    release: Callable[[], None]
    #: The first half of the rows are gates of the second half.
    gated: bool = False


@dataclass(frozen=True)
class LayerParts:
    """One layer; parts that it lacks are None."""

    norm: NormPart | None
    qkv: LinearPart
    q_norm: NormPart | None
    k_norm: NormPart | None
    #: Index into `DecoderParts.angles`; None: positions are not encoded in this layer.
    rope: int | None
    scale: float
    window: int | None
    softcap: float | None
    #: [n_heads]
    sinks: torch.Tensor | None
    out: LinearPart
    out_norm: NormPart | None
    mlp_norm: NormPart | None
    up: LinearPart
    activation: str
    down: LinearPart
    mlp_out_norm: NormPart | None


@dataclass(frozen=True)
class DecoderParts:
    """A decoder from tokens to logits, or one stage of it."""

    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    #: Place of the first of the layers among those of the model.
    first_layer: int
    layers: tuple[LayerParts, ...]
    dtype: torch.dtype
    n_vocab: int
    #: [n_vocab, hidden]; None where another stage embeds and the head is not tied to it.
    embedding: torch.Tensor | None
    #: Tokens are embedded, rather than activations of the stage before taken.
    embeds: bool
    embedding_scale: float
    #: None, like the head, before the last stage.
    final_norm: NormPart | None
    head: LinearPart | None
    #: The head's weights are the embedding's.
    tied: bool
    parallel: bool
    #: Pairs of a head's numbers are neighbours, not half a rotary width apart.
    interleaved: bool
    residual_multiplier: float
    logit_scale: float
    logit_softcap: float | None
    #: Each gives the cosines and sines, both [n, n_pairs], of the first n positions.
    angles: tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], ...]
