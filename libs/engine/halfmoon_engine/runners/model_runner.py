"""Define how a paged engine has its model computed: by transformers, natively, or by vLLM."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.interface import EngineStage, LayerHook, Run, StageActivations
from halfmoon_models.pool_size import PoolRoom


class ModelRunner(Protocol):
    """A model's arithmetic over an attached pool."""

    @property
    def description(self) -> str:
        """Name of what computes, for the log and for operators."""
        ...

    @property
    def checks_pages(self) -> bool:
        """Return whether `logits` raises ValueError for a page that is not in the pool."""
        ...

    def open_stage(self, index: int, n_stages: int) -> "tuple[EngineStage, ModelRunner]":
        """Return a runner of one stage over the weights of this one, and what the stage is.

        Raises:
            BadEngineStage: the model can't be cut so.
        """
        ...

    def attach(self, memory: memoryview) -> int:
        """Use this memory as the pool; return its pages.

        Raises:
            ValueError: it holds no page, or is read-only.
        """
        ...

    def pool_room(self) -> PoolRoom:
        """Say where the bytes of a pool would lie; see `Engine.pool_room`."""
        ...

    def allocate_pool(self, n_bytes: int) -> object | None:
        """Use memory of the device as the pool; see `Engine.allocate_pool`."""
        ...

    def detach(self) -> None:
        """Release the attached memory."""
        ...

    def check_alive(self) -> None:
        """Raise EngineLost if a process that computes the model has ended; from any thread."""
        ...

    def logits(
        self,
        runs: Sequence[Run],
        tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        before_layer: LayerHook | None,
        after_layer: LayerHook | None,
        activations: StageActivations | None,
    ) -> torch.Tensor:
        """Run a batch over the attached pool; it is checked, but for what `checks_pages` says.

        Args:
            runs: the batch.
            tokens: of all runs, one run after the other; in the vocabulary.
            rows: tokens whose logits are wanted, by their places in `tokens`.
            before_layer: see `Engine.forward`.
            after_layer: see `Engine.forward`.
            activations: checked; None where all layers are computed.

        Returns:
            [n_rows, vocab]; a stage before the last one has no rows.
        """
        ...
