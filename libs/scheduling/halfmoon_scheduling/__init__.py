"""Decide as plain functions of state, event and time: placement, admission, batches, eviction.

The names below are imported when they are first used, since a service needs few of them.
Events go in and commands come out: `halfmoon_scheduling.events`, `halfmoon_scheduling.commands`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfmoon_scheduling.cache.block_cache import BlockCache
    from halfmoon_scheduling.conductor.conductor_machine import Conductor
    from halfmoon_scheduling.config import SchedulingConfig
    from halfmoon_scheduling.decode.decode_batch import DecodeBatch
    from halfmoon_scheduling.directory.prefix_index import PrefixIndex
    from halfmoon_scheduling.prediction.cost_model import CostModel
    from halfmoon_scheduling.prefill.prefill_queue import PrefillQueue

__all__ = [
    "BlockCache",
    "Conductor",
    "CostModel",
    "DecodeBatch",
    "PrefillQueue",
    "PrefixIndex",
    "SchedulingConfig",
]

#: Module of each public name, below this package.
_MODULES = {
    "BlockCache": "cache.block_cache",
    "Conductor": "conductor.conductor_machine",
    "CostModel": "prediction.cost_model",
    "DecodeBatch": "decode.decode_batch",
    "PrefillQueue": "prefill.prefill_queue",
    "PrefixIndex": "directory.prefix_index",
    "SchedulingConfig": "config",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
