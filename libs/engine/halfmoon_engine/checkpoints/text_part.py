"""Choose the class of transformers that writes a model's text, and leave out other parts.

A model that reads images or sounds has towers beside its language model. Text alone never passes
through them, so they are replaced before weights are loaded: they take neither time nor memory.
"""

from typing import Any

import torch
import transformers as _transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from halfmoon_models.errors import UnsupportedModel, one_line

transformers: Any = _transformers
#: The part that reads and writes text, of a configuration for a model that speaks as well.
_THINKER = "thinker_config"


class UnusedPart(torch.nn.Module):
    """Stand in for a part that reads no text."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        #: A tuple, so that the module is not registered as a part of this one.
        self._embedding = (embedding,)

    @property
    def device(self) -> torch.device:
        """Where the model is: some code moves tokens to the device of its tower."""
        return next(self._embedding[0].parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the model."""
        return next(self._embedding[0].parameters()).dtype


def text_config_of(config: Any) -> Any:
    """Return the configuration of what writes text: of a model that speaks, its thinker's."""
    return getattr(config, _THINKER, None) or config


def text_class(config: Any) -> Any:
    """Return transformers' auto class that makes the model with a head for text.

    Args:
        config: of transformers, from `text_config_of`.

    Raises:
        UnsupportedModel: transformers has no such class for the type.
    """
    kind = str(config.model_type)
    if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForMultimodalLM
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    raise UnsupportedModel(
        f"a model of type {one_line(kind, 60)!r} can't be served: transformers "
        f"{transformers.__version__} has no class for it that continues a text; choose a "
        "decoder-only language model, alone or as a part that also reads images or sounds"
    )


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
