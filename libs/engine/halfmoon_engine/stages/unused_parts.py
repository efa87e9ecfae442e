"""Leave out what text does not use of a multimodal model.

A model that reads images or sounds has towers beside its language model. Text alone never passes
through them, so they are replaced before weights are loaded: they take neither time nor memory.
"""

from typing import Any

import torch


class UnusedPart(torch.nn.Module):
    """Stand in for a part that reads no text."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        #: A tuple, so that the module is not registered as a part of this one.
        self._embedding = (embedding,)

    @property
    def device(self) -> torch.device:
        """Return where the model is: some code moves tokens to the device of its tower."""
        return next(self._embedding[0].parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Return the precision of the model."""
        return next(self._embedding[0].parameters()).dtype


def leave_out_other_inputs(model: Any) -> None:
    """Replace all parts of a multimodal model that stand beside its language model.

    Args:
        model: of transformers, without weights.
    """
    config = model.config
    if config.get_text_config(decoder=True) is config:
        return
    used = {id(part) for part in (model.get_decoder(), model.get_output_embeddings())}
    if id(model) in used:
        return
    _leave_out(model, used, model.get_input_embeddings())


def _leave_out(parent: torch.nn.Module, used: set[int], embedding: torch.nn.Module) -> None:
    for name, part in list(parent.named_children()):
        if id(part) in used:
            continue
        if any(id(inner) in used for inner in part.modules()):
            _leave_out(part, used, embedding)
        elif any(True for _ in part.parameters()) or any(True for _ in part.buffers()):
            parent.set_submodule(name, UnusedPart(embedding))
