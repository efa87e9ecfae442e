"""Cut a model's layers into stages, and check what a stage is asked for."""

from collections.abc import Sequence

from halfmoon_engine.errors import BadEngineStage
from halfmoon_engine.interface import EngineStage, Run, StageActivations
from halfmoon_protocol.stage_layers import stage_layers

#: Bytes of a number between stages: float32 whatever computes, so that engines of several kinds
#: can be stages of one model.
ACTIVATION_ITEM_BYTES = 4


def cut_layers(n_layers: int, activation_bytes: int, index: int, n_stages: int) -> EngineStage:
    """Return a stage of a model's layers.

    Args:
        n_layers: of the model.
        activation_bytes: of one token between two stages.
        index: of the stage, from 0.
        n_stages: runs that the layers are cut into; 1 for all layers in one.

    Raises:
        BadEngineStage: there is no such stage, or there are more stages than layers.
    """
    check_stage_index(index, n_stages)
    if n_stages > n_layers:
        raise BadEngineStage(
            f"n_stages is {n_stages}: the model has {n_layers} layers, and each stage has a layer "
            f"of its own; choose at most {n_layers}"
        )
    layers = stage_layers(n_layers, n_stages, index)
    return EngineStage(
        index=index,
        n_stages=n_stages,
        first_layer=layers.start,
        n_layers=len(layers),
        activation_bytes=0 if n_stages == 1 else activation_bytes,
    )


def check_stage_index(index: int, n_stages: int) -> None:
    """Check that there is such a stage.

    Raises:
        BadEngineStage: naming both numbers and the limit.
    """
    if n_stages < 1:
        raise BadEngineStage(f"n_stages is {n_stages}: there is at least 1")
    if not 0 <= index < n_stages:
        raise BadEngineStage(
            f"stage {index} of {n_stages} does not exist: stages are 0 to {n_stages - 1}"
        )


def check_can_lend(own: EngineStage, index: int, n_stages: int) -> None:
    """Check that an engine of these layers can lend some of them to a stage.

    Raises:
        BadEngineStage: it is a stage itself, or there is no such stage.
    """
    if not own.is_whole:
        raise BadEngineStage(
            f"stage {own.index} of {own.n_stages} has {own.n_layers} layers of its model and can't "
            f"lend them to stage {index} of {n_stages}: open an engine of all layers"
        )
    if n_stages < 2:
        raise BadEngineStage(f"n_stages is {n_stages}: layers are lent to one of 2 stages or more")
    check_stage_index(index, n_stages)


def check_activations(
    runs: Sequence[Run], stage: EngineStage, activations: StageActivations | None
) -> None:
    """Refuse a batch that asks a stage for what it does not compute.

    Raises:
        ValueError: a token or a score is wanted before the last stage, or activations are
            missing, of another size, read-only, or of no use.
    """
    if not stage.is_last:
        for i, run in enumerate(runs):
            if run.draw is not None or run.scoring is not None:
                raise ValueError(
                    f"run {i} wants a token or scores of stage {stage.index}; only the last one, "
                    f"stage {stage.n_stages - 1}, has them: ask there"
                )
    incoming = outgoing = None
    if activations is not None:
        incoming, outgoing = activations.incoming, activations.outgoing
    n_bytes = sum(len(run.token_ids) for run in runs) * stage.activation_bytes
    _check_side("incoming", incoming, not stage.is_first, n_bytes, stage)
    _check_side("outgoing", outgoing, not stage.is_last, n_bytes, stage)
    if outgoing is not None and outgoing.readonly:
        raise ValueError("outgoing activations are read-only memory; a stage writes there")


def _check_side(
    name: str, side: memoryview | None, wanted: bool, n_bytes: int, stage: EngineStage
) -> None:
    where = f"stage {stage.index} of {stage.n_stages}"
    if (side is not None) != wanted:
        raise ValueError(
            f"{where} has no {name} activations: give None"
            if side is not None
            else f"{where} needs {name} activations of {n_bytes} bytes, none were given"
        )
    if side is not None and (side.nbytes != n_bytes or not side.contiguous):
        raise ValueError(
            f"{where} needs {n_bytes} contiguous bytes of {name} activations, "
            f"{side.nbytes} were given"
        )
