"""Run what a stage has of a model, from tokens or activations to activations or logits."""

import inspect
from typing import Any

import numpy as np
import torch

from halfmoon_engine.interface import EngineStage, StageActivations
from halfmoon_engine.stages.model_cut import LeftStage, OtherStageEmbedding, OtherStageLayer


class StageModel:
    """A loaded model of transformers: all of it, or cut to a stage by `model_cut`."""

    def __init__(self, model: Any, stage: EngineStage | None = None) -> None:
        """Wrap a model.

        Args:
            model: in evaluation mode, on its device.
            stage: that it was cut to; None: it has all layers.
        """
        self.model = model
        self.stage = stage or EngineStage(n_layers=0)
        self.selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        entries = [
            part
            for part in model.modules()
            if isinstance(part, OtherStageLayer) and part.role == "enter"
        ]
        assert len(entries) == (not self.stage.is_first), "a model that was not cut to its stage"
        self._entry = entries[0] if entries else None
        for part in model.modules():
            if isinstance(part, OtherStageEmbedding):
                part.dtype = model.dtype

    @property
    def first_layer(self) -> int:
        """Number of the stage's first layer among the model's."""
        return self.stage.first_layer

    def own_layers(self) -> list[Any]:
        """Return the layers of the stage; empty for a model that is not cut."""
        model: torch.nn.Module = self.model
        for part in model.modules():
            if isinstance(part, torch.nn.ModuleList) and any(
                isinstance(layer, OtherStageLayer) for layer in part
            ):
                return [layer for layer in part if not isinstance(layer, OtherStageLayer)]
        return []

    @property
    def hidden_size(self) -> int:
        """Numbers of a token between layers."""
        return int(self.model.config.get_text_config(decoder=True).hidden_size)

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        incoming: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run a row of tokens.

        Args:
            tokens: [n_tokens]
            positions: of the tokens; None: 0 to n_tokens - 1.
            incoming: [n_tokens, hidden] of the stage before; None at the first stage.
            kept: tokens whose logits are wanted, by their places; None: all of them.

        Returns:
            Logits of the kept tokens at the last stage, else [n_tokens, hidden] of all tokens.
        """
        device, options = self.model.device, {}
        if positions is not None:
            options["position_ids"] = positions[None].to(device)
        if kept is not None and self.selects_logits:
            options["logits_to_keep"] = kept.to(device)
        if self._entry is not None:
            assert incoming is not None, "a stage after the first one needs activations"
            self._entry.incoming = incoming[None].to(device, self.model.dtype)
        try:
            out = self.model(input_ids=tokens[None].to(device), use_cache=False, **options)
        except LeftStage as left:
            return left.hidden[0]
        finally:
            if self._entry is not None:
                self._entry.incoming = None
        logits: torch.Tensor = out.logits[0]
        return logits if kept is None or self.selects_logits else logits[kept.to(device)]


def activation_rows(
    activations: StageActivations | None, width: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """View incoming and outgoing activations as tensors: [n_tokens, width], float32."""
    if activations is None:
        return None, None
    incoming, outgoing = (
        None if side is None else _floats(side).view(-1, width)
        for side in (activations.incoming, activations.outgoing)
    )
    return incoming, outgoing


def _floats(side: memoryview) -> torch.Tensor:
    rows = np.frombuffer(side.cast("B"), dtype=np.float32)
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())
