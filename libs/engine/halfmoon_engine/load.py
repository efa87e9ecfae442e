"""Open an engine by its name. Importing this imports neither torch nor transformers."""

from typing import TYPE_CHECKING, Literal

import msgspec

from halfmoon_engine.checkpoints.model_folder import open_model_folder
from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec
from halfmoon_engine.interface import Device, Engine
from halfmoon_engine.native.extension import NativeMode
from halfmoon_engine.torch_threads import limit_spin_waits
from halfmoon_protocol.kv_layout import DType

if TYPE_CHECKING:
    from halfmoon_engine.torch_engine import TorchEngine


def open_engine(
    spec: str,
    *,
    block_size: int,
    dtype: DType | Literal["auto"] = "auto",
    device: Device = "auto",
    threads: int | None = None,
    served_name: str | None = None,
    native: NativeMode = "auto",
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

    Raises:
        BadEngineSpec: a spec of a fake engine that can't be read.
        ModelNotFound: neither a folder with a model nor a hub id that could be fetched.
        BrokenCheckpoint: files that are damaged, contradict each other or hold absurd values.
        UnsupportedModel: a kind of model, or a format, that is not served.
        ProtocolError: a block size out of range.
        NativeUnavailable: the extension is asked for and not installed.
    """
    if spec.startswith("fake://"):
        model = parse_fake_spec(spec)
        if served_name is not None:
            model = msgspec.structs.replace(model, name=served_name)
        return FakeEngine(model, block_size=block_size)
    return load_engine(
        spec,
        block_size=block_size,
        dtype=dtype,
        device=device,
        threads=threads,
        served_name=served_name,
        native=native,
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
) -> "TorchEngine":
    """Load a causal language model and prepare it for a paged pool; see `open_engine`.

    Its folder is inspected before torch is imported, so most refusals come at once.
    """
    inspected = open_model_folder(path_or_hub_id, dtype=dtype)
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
    )
