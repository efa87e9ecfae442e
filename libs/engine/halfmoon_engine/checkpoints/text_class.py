"""Choose the class of transformers that writes a model's text, and its configuration."""

from typing import Any

import transformers as _transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from halfmoon_models.errors import UnsupportedModel, one_line

transformers: Any = _transformers
#: The part that reads and writes text, of a configuration for a model that speaks as well.
_THINKER = "thinker_config"


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
