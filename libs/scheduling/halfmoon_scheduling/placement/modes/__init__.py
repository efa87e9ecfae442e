"""Register the placement modes: each module of this package defines some, and registers them.

The modules are found by their folder. So a new mode is one new file here, and nothing else
has a list to extend.
"""

from importlib import import_module
from pkgutil import iter_modules

from halfmoon_scheduling.placement.placement_mode import (
    PLACEMENT_MODES,
    ModeSettings,
    PlacementMode,
)

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)

__all__ = ["PLACEMENT_MODES", "open_placement_mode"]


def open_placement_mode(name: str, settings: ModeSettings | None = None) -> PlacementMode:
    """Open a placement mode by name.

    Raises:
        ValueError: no mode has this name; the message lists those that there are.
    """
    return PLACEMENT_MODES[PLACEMENT_MODES.check(name)](settings or ModeSettings())
