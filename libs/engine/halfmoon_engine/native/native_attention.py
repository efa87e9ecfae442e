"""Attend natively under transformers' own modelling code."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from halfmoon_engine.interface import Run
from halfmoon_engine.native.native_batch import native_batch


class NativeBatchAttention:
    """Attention of one batch; a `NativeAttention` of its plan."""

    def __init__(self, native: Any, pool: Any, runs: Sequence[Run]) -> None:
        self._native = native
        self._batch = native_batch(native, pool, runs)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, each [n_tokens, n_kv_heads, head_dim]."""
        self._native.write_kv(self._batch, layer, _floats(keys), _floats(values))

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with queries of shape [n_tokens, n_heads, head_dim]; the result is like them."""
        out = np.empty(queries.shape, dtype=np.float32)
        self._native.attend(
            self._batch,
            layer,
            _floats(queries),
            out,
            queries.shape[1],
            scale,
            window or 0,
            softcap or 0.0,
            None if sinks is None else _floats(sinks),
        )
        return torch.from_numpy(out).to(queries.dtype)


def _floats(tensor: torch.Tensor) -> Any:
    return tensor.detach().float().contiguous().numpy()
