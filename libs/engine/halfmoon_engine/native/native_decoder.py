"""Pack a decoder's parts for the native extension, and run batches through it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.attention.kv_pool import DTYPE_NAMES
from halfmoon_engine.interface import LayerHook, StageActivations
from halfmoon_engine.native.decoder_parts import DecoderParts, LayerParts, LinearPart, NormPart

#: Positions whose angles are computed at first; doubled whenever a run exceeds them.
_FIRST_POSITIONS = 4096


class NativeDecoder:
    """Layers of a model, or of its stage, packed; one forward at a time."""

    def __init__(self, native: Any, parts: DecoderParts, max_context: int) -> None:
        """Pack the parts; the model's own weights are freed, each as soon as it is packed.

        Args:
            native: the extension's module.
            parts: of the model.
            max_context: tokens of the longest sequence.
        """
        self._max_context = max_context
        self._native = native
        # Copied, so that nothing keeps the checkpoint's mapped files in memory.
        embedding = None
        if parts.embedding is not None and (parts.embeds or parts.tied):
            embedding = parts.embedding.detach().clone()
        self._angles = parts.angles
        self._logit_scale, self._logit_softcap = parts.logit_scale, parts.logit_softcap
        self._rotates = any(layer.rope is not None for layer in parts.layers)
        n_pairs = parts.angles[0](2)[0].shape[-1]
        if parts.head is None:
            head = None
        elif parts.tied and embedding is not None:
            head = _memory(embedding)
        else:
            head = self._pack(parts.head)
        n_logits = parts.n_vocab if parts.head is None else parts.head.n_out
        self._decoder = native.Decoder(
            hidden=parts.hidden,
            n_heads=parts.n_heads,
            n_kv_heads=parts.n_kv_heads,
            head_dim=parts.head_dim,
            n_pairs=n_pairs,
            embedding=_memory(embedding) if parts.embeds and embedding is not None else None,
            n_vocab=parts.n_vocab,
            embedding_dtype=DTYPE_NAMES[parts.dtype],
            head=head,
            n_logits=n_logits,
            head_dtype=DTYPE_NAMES[parts.dtype],
            final_norm=_norm(parts.final_norm),
            interleaved=parts.interleaved,
            parallel=parts.parallel,
            residual_multiplier=parts.residual_multiplier,
            embedding_scale=parts.embedding_scale,
        )
        for layer in parts.layers:
            self._add_layer(layer)
        self._n_positions = 0
        self._n_logits = n_logits

    def logits(
        self,
        batch: Any,
        end: int,
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        before_layer: LayerHook | None,
        after_layer: LayerHook | None,
        activations: StageActivations | None = None,
    ) -> torch.Tensor:
        """Run a batch and return the logits of some rows: float32, [n_rows, n_logits].

        Args:
            batch: of the extension.
            end: one more than the highest position in the batch.
            tokens: [n_tokens]
            rows: rising.
            before_layer: see `Engine.forward`.
            after_layer: see `Engine.forward`.
            activations: of a stage; float32, [n_tokens, hidden].
        """
        if end > self._n_positions and self._rotates:
            self._compute_angles(end)
        logits = np.empty((len(rows), self._n_logits), dtype=np.float32)
        options: dict[str, Any] = {}
        if activations is not None:
            options = {"incoming": activations.incoming, "outgoing": activations.outgoing}
        self._decoder.forward(
            batch, tokens, rows, len(rows), logits, before_layer, after_layer, **options
        )
        result = torch.from_numpy(logits)
        if self._logit_scale != 1.0:
            result *= self._logit_scale
        if (cap := self._logit_softcap) is not None:
            result = torch.tanh(result / cap) * cap
        return result

    def _compute_angles(self, end: int) -> None:
        # Never beyond the context: LongRoPE has other angles for longer sequences.
        n = min(self._max_context, max(_FIRST_POSITIONS, 1 << (end - 1).bit_length()))
        for table, angles in enumerate(self._angles):
            cosines, sines = angles(n)
            self._decoder.set_rope(table, cosines.numpy(), sines.numpy())
        self._n_positions = n

    def _add_layer(self, layer: LayerParts) -> None:
        self._decoder.add_layer(
            norm=_norm(layer.norm),
            qkv=self._pack(layer.qkv),
            q_norm=_norm(layer.q_norm),
            k_norm=_norm(layer.k_norm),
            rope=-1 if layer.rope is None else layer.rope,
            scale=layer.scale,
            window=layer.window or 0,
            softcap=layer.softcap or 0.0,
            sinks=None if layer.sinks is None else layer.sinks.float().contiguous().numpy(),
            out=self._pack(layer.out),
            out_norm=_norm(layer.out_norm),
            mlp_norm=_norm(layer.mlp_norm),
            up=self._pack(layer.up),
            activation=layer.activation,
            down=self._pack(layer.down),
            mlp_out_norm=_norm(layer.mlp_out_norm),
        )

    def _pack(self, part: LinearPart) -> Any:
        weights = part.weights().detach().contiguous()
        packed = self._native.Linear(
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
