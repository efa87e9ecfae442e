"""Open the engine of one stage, which shares weights and pool with the engine of all layers."""

import asyncio

import msgspec

from halfmoon_engine.interface import Engine
from halfmoon_models.errors import ModelError
from halfmoon_protocol.messages import Stage
from halfmoon_protocol.stage_layers import stage_layers
from halfmoon_runtime.lifecycle import CannotStart
from halfmoon_transfer.regions.region_table import PoolMemory
from halfmoon_workers.prefill.share_validation import layers_fault


async def open_stage(whole: Engine, stage: Stage) -> Engine:
    """Return an engine of one stage over the weights of a loaded model; in a thread.

    Raises:
        CannotStart: there are more stages than layers, or the engine computes no stages.
    """
    if fault := layers_fault(stage, whole):
        raise CannotStart(fault)
    try:
        return await asyncio.to_thread(whole.open_stage, stage.index, stage.n_stages)
    except ModelError as error:
        raise CannotStart(str(error)) from error


def say_layers(stage: Stage, n_layers: int) -> Stage:
    """Return a stage with the layers that it has of a model."""
    layers = stage_layers(n_layers, stage.n_stages, stage.index)
    return msgspec.structs.replace(stage, first_layer=layers.start, n_layers=len(layers))


def host_view(memory: PoolMemory) -> memoryview:
    """Return a pool's memory for a second engine.

    Raises:
        CannotStart: the pool is on a device, which only the engine that made it can use.
    """
    if not isinstance(memory.view, memoryview):
        raise CannotStart(
            "group: the pool of KV is memory of a device, which two engines can't share yet; "
            "leave --group and --stage out, or choose --device cpu"
        )
    return memory.view
