"""Cut a model of transformers to the layers of one stage, before its weights are loaded.

Layers of other stages are replaced by parts without weights. The model's own code still runs
from end to end, so positions, rotary embeddings, windows and masks are computed as ever:

    embeddings → layers before pass on, the last of them gives what came from the stage before
               → the stage's own layers
               → the first layer after them ends the forward with what goes to the next stage

Embeddings are loaded at the first stage, the head at the last one. Where both are one tensor,
both stages have it. What is neither, such as the last norm, is small and loaded everywhere.
"""

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch

from halfmoon_engine.errors import BadEngineStage
from halfmoon_engine.interface import EngineStage
from halfmoon_engine.stages.stage_checks import ACTIVATION_ITEM_BYTES, cut_layers
from halfmoon_engine.stages.unused_parts import UnusedPart

#: What a replaced layer does with its input.
_Role = Literal["pass", "enter", "leave"]


class LeftStage(Exception):
    """The forward has reached the layers of the next stage."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("the next stage goes on")
        self.hidden = hidden


class OtherStageLayer(torch.nn.Module):
    """Stand in for a layer of another stage."""

    def __init__(self, layer: torch.nn.Module, role: _Role) -> None:
        super().__init__()
        # What the model's code asks of a layer before it calls it, such as its type.
        for name, value in vars(layer).items():
            if isinstance(value, str | int) and not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self.role = role
        #: What came from the stage before, [1, n_tokens, hidden].
        self.incoming: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the input or what came, or end the forward."""
        if self.role == "leave":
            raise LeftStage(hidden_states)
        return hidden_states if self.incoming is None else self.incoming


class OtherStageEmbedding(torch.nn.Module):
    """Stand in for embeddings that the first stage reads: zeros."""

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        #: Of the model; other parts take theirs from it.
        self.dtype = torch.float32

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return zeros for all tokens."""
        return torch.zeros((*ids.shape, self.embedding_dim), dtype=self.dtype, device=ids.device)


class OtherStageHead(torch.nn.Identity):
    """Stand in for the head, which the last stage has."""


def stage_of(config: Any, index: int, n_stages: int) -> EngineStage:
    """Return a stage of the model that a transformers config describes.

    Returns:
        For one stage, `n_layers` is 0: the probe counts the layers.

    Raises:
        BadEngineStage: the model can't be cut so.
    """
    if n_stages == 1:
        return EngineStage(n_layers=0)
    text = config.get_text_config(decoder=True)
    if getattr(text, "hidden_size_per_layer_input", None):
        raise BadEngineStage(
            f"a model of type {str(config.model_type)!r} can't be cut into stages: each of its "
            "layers reads embeddings of its own; run it without a stage"
        )
    n_bytes = int(text.hidden_size) * ACTIVATION_ITEM_BYTES
    return cut_layers(model_layers(config), n_bytes, index, n_stages)


def model_layers(config: Any) -> int:
    """Return how many layers the model of a transformers config has."""
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def partial_class(model_class: type[Any], *cuts: Callable[[Any], None]) -> type[Any]:
    """Return a class of transformers that makes models without some of their parts.

    Args:
        model_class: of whole models.
        cuts: functions that replace parts of a model without weights, called one after the other.
    """

    def init(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        model_class.__init__(self, config, *arguments, **options)
        for cut in cuts:
            cut(self)

    names = {"__init__": init, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), names)


def cut_model(model: Any, stage: EngineStage) -> None:
    """Replace the parts of a model that other stages compute.

    Args:
        model: of transformers, without weights.
        stage: the layers that stay.

    Raises:
        BadEngineStage: its layers are not found.
    """
    if stage.is_whole:
        return
    layers = _find_layers(model, model_layers(model.config))
    end = stage.first_layer + stage.n_layers
    for i, layer in enumerate(layers):
        if not stage.first_layer <= i < end:
            role: _Role = "enter" if i == stage.first_layer - 1 else "pass"
            layers[i] = OtherStageLayer(layer, "leave" if i == end else role)
    inside = {id(module) for layer in layers for module in layer.modules()}
    tied = bool(model.all_tied_weights_keys)
    if not (stage.is_first or (stage.is_last and tied)):
        _replace(
            model,
            lambda each: isinstance(each, torch.nn.Embedding) and id(each) not in inside,
            OtherStageEmbedding,
        )
    head = model.get_output_embeddings()
    if not (stage.is_last or (stage.is_first and tied)):
        _replace(model, lambda each: each is head, lambda _: OtherStageHead())
    if not (stage.is_first or stage.is_last):
        model.all_tied_weights_keys = {}


def cut_sharing(model: Any, stage: EngineStage) -> Any:
    """Return a model of the stage's layers whose tensors are those of a loaded model.

    Args:
        model: of transformers, with all layers; it stays as it is.
        stage: the layers of the new model.

    Raises:
        BadEngineStage: its layers are not found.
    """
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    # Modules and config are copied; a tensor that is in the memo is its own copy.
    part = copy.deepcopy(model, {id(each): each for each in tensors})
    cut_model(part, stage)
    return part


def absent_parts(model: Any) -> tuple[str, ...]:
    """Return the names of the parts that other stages have, or that text does not use."""
    kinds = OtherStageLayer | OtherStageEmbedding | OtherStageHead | UnusedPart
    return tuple(name for name, part in model.named_modules() if isinstance(part, kinds))


def _find_layers(model: Any, n_layers: int) -> torch.nn.ModuleList:
    found = [
        part
        for part in model.modules()
        if isinstance(part, torch.nn.ModuleList)
        and len(part) == n_layers
        and all(_attends_as(layer, i) for i, layer in enumerate(part))
    ]
    if len(found) != 1:
        raise BadEngineStage(
            f"a model of type {str(model.config.model_type)!r} can't be cut into stages: it has "
            f"{len(found)} lists of {n_layers} layers that attend; run it without a stage"
        )
    return found[0]


def _attends_as(layer: torch.nn.Module, index: int) -> bool:
    return any(getattr(part, "layer_idx", None) == index for part in layer.modules())


def _replace(
    model: Any,
    wanted: Callable[[torch.nn.Module], bool],
    make: Callable[[Any], torch.nn.Module],
) -> None:
    for name, part in list(model.named_modules()):
        if wanted(part):
            model.set_submodule(name, make(part))
