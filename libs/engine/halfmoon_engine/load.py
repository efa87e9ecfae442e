"""Open an engine by its name. Importing this imports neither torch nor transformers.

Other packages add engines: entry points of the group `halfmoon.engines`, each a function with
the arguments of `EngineLoader`.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from halfmoon_engine.checkpoints.model_folder import open_model_folder
from halfmoon_engine.errors import BadEngineOption, EngineNotInstalled
from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec
from halfmoon_engine.interface import Device, Engine
from halfmoon_engine.native.extension import NativeMode
from halfmoon_engine.stages.stage_checks import check_stage_index
from halfmoon_engine.torch_threads import limit_spin_waits
from halfmoon_protocol.kv_layout import DType

#: Group of the entry points by which packages add engines.
ENGINE_ENTRY_POINTS = "halfmoon.engines"
_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})

if TYPE_CHECKING:
    from halfmoon_engine.paged_engine import PagedEngine


def open_engine(
    spec: str,
    *,
    block_size: int,
    dtype: DType | Literal["auto"] = "auto",
    device: Device = "auto",
    threads: int | None = None,
    served_name: str | None = None,
    native: NativeMode = "auto",
    engine: str = "torch",
    engine_options: Mapping[str, str] = _NO_OPTIONS,
    stage_index: int = 0,
    n_stages: int = 1,
) -> Engine:
    """Open the engine that `spec` names.

    Args:
        spec: ``fake://…`` (see `fake_engine.parse_fake_spec`), or a model's folder or hub id.
        block_size: tokens per page, 16 to 512.
        dtype: of weights and KV; "auto" is what `choose_dtype` chooses.
        device: where a model computes; "auto" is CUDA if there is a device.
        threads: CPU threads of a model; None or 0 is one per core of the process's quota.
        served_name: the model's name in requests, rather than its own.
        native: whether halfmoon-engine-native computes on the CPU; "auto" where it is installed
            and `HALFMOON_ENGINE_NATIVE` is not 0.
        engine: what computes a model: "torch", or an installed package's, such as "vllm".
        engine_options: of that package's engine; torch has none.
        stage_index: the run of layers to compute, from 0.
        n_stages: runs that the layers are cut into; 1 computes them all.

    Raises:
        BadEngineStage: no such stage, or more stages than layers.
        EngineNotInstalled: no installed package has this engine.
        BadEngineOption: the engine has no such option, or not such a value.
        BadEngineSpec: a spec of a fake engine that can't be read.
        ModelNotFound: neither a folder with a model nor a hub id that could be fetched.
        BrokenCheckpoint: files that are damaged, contradict each other or hold absurd values.
        UnsupportedModel: a kind of model, or a format, that is not served.
        ProtocolError: a block size out of range.
        NativeUnavailable: the extension is asked for and not installed.
    """
    check_stage_index(stage_index, n_stages)
    if spec.startswith("fake://"):
        model = parse_fake_spec(spec)
        if served_name is not None:
            model = msgspec.structs.replace(model, name=served_name)
        return FakeEngine(model, block_size=block_size, stage_index=stage_index, n_stages=n_stages)
    if engine != "torch":
        return _find_loader(engine)(
            spec,
            block_size=block_size,
            dtype=dtype,
            device=device,
            threads=threads,
            served_name=served_name,
            options=engine_options,
            stage_index=stage_index,
            n_stages=n_stages,
        )
    if engine_options:
        raise BadEngineOption(f"engine torch has no options, {sorted(engine_options)} were given")
    return load_engine(
        spec,
        block_size=block_size,
        dtype=dtype,
        device=device,
        threads=threads,
        served_name=served_name,
        native=native,
        stage_index=stage_index,
        n_stages=n_stages,
    )


class EngineLoader(Protocol):
    """Load a model for an engine of another package; arguments are those of `open_engine`."""

    def __call__(
        self,
        spec: str,
        *,
        block_size: int,
        dtype: DType | Literal["auto"],
        device: Device,
        threads: int | None,
        served_name: str | None,
        options: Mapping[str, str],
        stage_index: int,
        n_stages: int,
    ) -> Engine:
        """Return the loaded engine.

        Raises:
            BadEngineStage: this engine computes no stage, or not this one.
        """
        ...


def _find_loader(engine: str) -> EngineLoader:
    installed = entry_points(group=ENGINE_ENTRY_POINTS)
    for each in installed.select(name=engine):
        loader: EngineLoader = each.load()
        return loader
    names = ", ".join(sorted({"torch", *installed.names}))
    raise EngineNotInstalled(
        f"engine {engine!r} is not installed: there are {names}; vllm comes with the package "
        "halfmoon-engine-vllm"
    )


def load_engine(
    path_or_hub_id: str,
    *,
    block_size: int,
    dtype: DType | Literal["auto"] = "auto",
    device: Device = "auto",
    threads: int | None = None,
    served_name: str | None = None,
    native: NativeMode = "auto",
    stage_index: int = 0,
    n_stages: int = 1,
) -> "PagedEngine":
    """Load a causal language model and prepare it for a paged pool; see `open_engine`.

    Its folder is inspected before torch is imported, so most refusals come at once.
    """
    inspected = open_model_folder(path_or_hub_id, dtype=dtype, n_stages=n_stages)
    limit_spin_waits()
    from halfmoon_engine.checkpoints.torch_loader import load_torch_engine

    return load_torch_engine(
        path_or_hub_id,
        inspected,
        block_size=block_size,
        dtype=dtype,
        device=device,
        threads=threads,
        served_name=served_name,
        native=native,
        stage_index=stage_index,
        n_stages=n_stages,
    )
