"""Load a worker's model and give it pages in registered memory.

This library imports neither engine nor transfer engine: each service hands in its own.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec
from prometheus_client import Counter

from halfmoon_protocol.kv_layout import DType, KvLayout
from halfmoon_protocol.messages import DecodeCost, PrefillCost, WorkerInfo
from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_runtime.lifecycle import CannotStart, Service, cannot_start_on
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog

MODEL_LOADS = Counter(
    "halfmoon_model_loads",
    "Models that this process loaded; a change of role loads none.",
)


class LoadedModel(Protocol):
    """A loaded model, as far as this library uses `halfmoon_engine.interface.Engine`."""

    @property
    def name(self) -> str:
        """Name of the model as clients write it."""
        ...

    @property
    def layout(self) -> KvLayout:
        """Layout of a page, of all layers even if only a stage's are loaded."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence that the model allows."""
        ...

    @property
    def description(self) -> str:
        """Name of what computes the model."""
        ...

    def attach(self, pool: memoryview) -> None:
        """Use this memory as the pool of pages."""
        ...

    def allocate_pool(self, n_bytes: int) -> object | None:
        """Use memory of the model's device as the pool; None: the pool is memory of the host."""
        ...

    def measure(self) -> tuple[PrefillCost, DecodeCost]:
        """Time a few forward passes and fit the cost models."""
        ...


class ViewedMemory(Protocol):
    """Memory that a transfer engine registered, as far as this library uses it."""

    @property
    def view(self) -> memoryview:
        """This process's view of the memory."""
        ...


MemoryT = TypeVar("MemoryT", bound=ViewedMemory)
DeviceT = TypeVar("DeviceT")
PlacedT = TypeVar("PlacedT")
ModelT = TypeVar("ModelT", bound=LoadedModel)
OpenedT = TypeVar("OpenedT", bound=LoadedModel, covariant=True)


class ModelOpener(Protocol[OpenedT]):
    """Load a model."""

    def __call__(
        self,
        spec: str,
        *,
        block_size: int,
        dtype: DType | Literal["auto"],
        device: Literal["auto", "cpu", "cuda"],
        threads: int | None,
        engine: str,
        engine_options: Mapping[str, str],
    ) -> OpenedT:
        """Load the model that `spec` names, in the calling thread."""
        ...


async def load_model(
    settings: EngineSettings,
    service: Service,
    open_engine: ModelOpener[ModelT],
    refusal: type[Exception],
) -> ModelT:
    """Load the model that the settings name, in a thread.

    Args:
        settings: the model, its precision, device and block size.
        service: reports that the model is loading.
        open_engine: loads it.
        refusal: error of `open_engine` that the user can mend, such as a missing folder.

    Raises:
        CannotStart: the model is refused; the text says why.
    """
    service.report_stage("loading", worker_id=settings.worker_id, model=settings.model)
    try:
        model = await asyncio.to_thread(
            open_engine,
            settings.model,
            block_size=settings.block_size,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads or None,
            engine=settings.engine,
            engine_options=settings.engine_options,
        )
    except refusal as error:
        raise CannotStart(str(error)) from error
    MODEL_LOADS.inc()
    return model


@dataclass(frozen=True)
class PlacedModel(Generic[PlacedT]):
    """A loaded model with its pool of pages."""

    memory: PlacedT
    n_pages: int
    #: Fitted to a few forward passes; defaults if the settings forbid measuring.
    prefill_cost: PrefillCost
    decode_cost: DecodeCost
    #: Runs each forward pass, and ends the process when one hangs.
    watch: ForwardWatchdog


@asynccontextmanager
async def place_model(
    settings: EngineSettings,
    service: Service,
    model: LoadedModel,
    n_pages: int,
    allocate: Callable[[int], MemoryT],
    register: Callable[[Any], DeviceT] | None = None,
) -> AsyncIterator[PlacedModel[MemoryT | DeviceT]]:
    """Give a model its pool of pages, measure its costs, and watch its forward passes.

    Args:
        settings: limit of a pass, and whether to measure.
        service: reports that the model is being measured.
        model: loaded, without a pool.
        n_pages: of the pool.
        allocate: makes registered memory of so many bytes.
        register: registers memory that the model allocated on its device; None: it can't.
    """
    n_bytes = n_pages * model.layout.block_bytes
    buffer = None if register is None else await asyncio.to_thread(model.allocate_pool, n_bytes)
    memory: MemoryT | DeviceT
    if register is not None and buffer is not None:
        memory = await asyncio.to_thread(register, buffer)
    else:
        asked = f"pool_mib {-(-n_bytes // 2**20)} can't be had; ask for less"
        with cannot_start_on(OSError, asked, may_pass=True):
            on_host = await asyncio.to_thread(allocate, n_bytes)
        model.attach(on_host.view)
        memory = on_host
    costs = PrefillCost(), DecodeCost()
    if settings.measure:
        service.report_stage("measuring", worker_id=settings.worker_id)
        costs = await asyncio.to_thread(model.measure)
    watch = ForwardWatchdog(settings.forward_limit_s)
    with watch.run_in_background():
        yield PlacedModel(memory, n_pages, *costs, watch)


def model_info(
    info: WorkerInfo, settings: EngineSettings, model: LoadedModel, n_pages: int
) -> WorkerInfo:
    """Return a worker's record with what its model says."""
    return msgspec.structs.replace(
        info,
        layout=model.layout,
        model=settings.served_model_name or model.name,
        max_context=model.max_context,
        n_blocks=n_pages,
        computes_with=model.description,
    )
