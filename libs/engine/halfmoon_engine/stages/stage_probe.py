"""Check that a cut model's layers take nothing but activations and positions from elsewhere."""

from typing import Any

import torch

from halfmoon_engine.errors import BadEngineStage
from halfmoon_engine.stages.stage_model import StageModel

_N_TOKENS = 7


def probe_incoming(staged: StageModel, tokens: torch.Tensor) -> torch.Tensor | None:
    """Make activations that are a function of each token; None for the first stage.

    Returns:
        [n_tokens, hidden], float32
    """
    if staged.stage.is_first:
        return None
    rows = [
        torch.randn(staged.hidden_size, generator=torch.Generator().manual_seed(int(token)))
        for token in tokens.tolist()
    ]
    return torch.stack(rows)


@torch.inference_mode()
def check_cut(staged: StageModel) -> None:
    """Refuse a model whose layers hand on more than one tensor, or read tokens themselves.

    Raises:
        BadEngineStage: naming what a layer takes or gives.
    """
    if staged.stage.is_whole:
        return
    kind = str(staged.model.config.model_type)
    width = staged.hidden_size
    taken, given = _calls(staged, 3)
    others, _ = _calls(staged, 100)
    for name, value in taken.items():
        if not torch.equal(value, others[name]):
            raise BadEngineStage(
                f"a model of type {kind!r} can't be cut into stages: beside activations, its "
                f"layers take {name!r}, which depends on the tokens; run it without a stage"
            )
    for out in given:
        if not isinstance(out, torch.Tensor) or out.shape != (1, _N_TOKENS, width):
            raise BadEngineStage(
                f"a model of type {kind!r} can't be cut into stages: its layers give a "
                f"{type(out).__name__}, not activations of shape [1, {_N_TOKENS}, {width}]; run "
                "it without a stage"
            )


def _calls(staged: StageModel, first_token: int) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Return tensors that the stage's layers take beside activations, and what they give."""
    taken: dict[str, torch.Tensor] = {}
    given: list[Any] = []

    def hook(module: Any, arguments: Any, options: Any, out: Any) -> None:
        del module
        rest = {name: each for name, each in options.items() if name != "hidden_states"}
        inputs = arguments if "hidden_states" in options else arguments[1:]
        _collect(f"call {len(given)}", (rest, tuple(inputs)), taken)
        given.append(out)

    tokens = torch.arange(first_token, first_token + _N_TOKENS) % _vocab_size(staged)
    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in staged.own_layers()]
    try:
        staged.run(tokens, torch.arange(_N_TOKENS), probe_incoming(staged, tokens))
    finally:
        for handle in handles:
            handle.remove()
    return taken, given


def _vocab_size(staged: StageModel) -> int:
    return int(staged.model.config.get_text_config(decoder=True).vocab_size)


def _collect(name: str, value: Any, found: dict[str, torch.Tensor]) -> None:
    """Add all tensors of a value by their places in it."""
    if isinstance(value, torch.Tensor):
        found[name] = value
    elif isinstance(value, dict):
        for key, part in value.items():
            _collect(f"{name}, {key}", part, found)
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            _collect(f"{name}, {i}", part, found)
