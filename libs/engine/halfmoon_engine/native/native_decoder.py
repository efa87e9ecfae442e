"""Run batches through a packed decoder of the native extension."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.interface import LayerHook, StageActivations
from halfmoon_engine.native.packed_decoder import PackedDecoder

#: Positions whose angles are computed at first; doubled whenever a run exceeds them.
_FIRST_POSITIONS = 4096


class NativeDecoder:
    """Layers of a model, or of its stage; one forward at a time."""

    def __init__(self, native: Any, packed: PackedDecoder) -> None:
        """Make a decoder over packed weights.

        Args:
            native: the extension's module.
            packed: the layers; they stay in memory as long as this decoder.
        """
        self._packed = packed
        self._decoder = native.Decoder(
            **packed.shape,
            embedding=packed.embedding,
            head=packed.head,
            final_norm=packed.final_norm,
            first_layer=packed.first_layer,
        )
        for layer in packed.layers:
            self._decoder.add_layer(**layer)
        self._n_positions = 0

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
        packed = self._packed
        if end > self._n_positions and packed.rotates:
            self._compute_angles(end)
        logits = np.empty((len(rows), packed.shape["n_logits"]), dtype=np.float32)
        options: dict[str, Any] = {}
        if activations is not None:
            options = {"incoming": activations.incoming, "outgoing": activations.outgoing}
        self._decoder.forward(
            batch, tokens, rows, len(rows), logits, before_layer, after_layer, **options
        )
        result = torch.from_numpy(logits)
        if packed.logit_scale != 1.0:
            result *= packed.logit_scale
        if (cap := packed.logit_softcap) is not None:
            result = torch.tanh(result / cap) * cap
        return result

    def _compute_angles(self, end: int) -> None:
        # Never beyond the context: LongRoPE has other angles for longer sequences.
        n = min(self._packed.max_context, max(_FIRST_POSITIONS, 1 << (end - 1).bit_length()))
        for table, angles in enumerate(self._packed.angles):
            cosines, sines = angles(n)
            self._decoder.set_rope(table, cosines.numpy(), sines.numpy())
        self._n_positions = n
