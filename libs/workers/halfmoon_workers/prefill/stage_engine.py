"""Load the engine of one stage, beside the engine of all layers that short prompts run on."""

from collections.abc import Mapping
from typing import Literal

from halfmoon_engine.interface import Engine
from halfmoon_engine.load import open_engine
from halfmoon_models.errors import ModelError
from halfmoon_protocol.kv_layout import DType
from halfmoon_protocol.messages import Stage
from halfmoon_runtime.lifecycle import CannotStart, Service
from halfmoon_runtime.worker.open_model import load_model
from halfmoon_transfer.regions.region_table import PoolMemory
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.prefill.share_validation import layers_fault


async def load_stage(
    settings: PrefillSettings, service: Service, whole: Engine, stage: Stage
) -> Engine:
    """Load the layers of one stage of a model, in a thread.

    Their weights take memory a second time: `whole` has them as well.

    Raises:
        CannotStart: the layers do not divide, or the engine computes no stages.
    """
    if fault := layers_fault(stage, whole):
        raise CannotStart(fault)

    def open_stage(
        spec: str,
        *,
        block_size: int,
        dtype: DType | Literal["auto"],
        device: Literal["auto", "cpu", "cuda"],
        threads: int | None,
        engine: str,
        engine_options: Mapping[str, str],
    ) -> Engine:
        return open_engine(
            spec,
            block_size=block_size,
            dtype=dtype,
            device=device,
            threads=threads,
            engine=engine,
            engine_options=engine_options,
            stage_index=stage.index,
            n_stages=stage.n_stages,
        )

    return await load_model(settings, service, open_stage, ModelError)


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
