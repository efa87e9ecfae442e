"""Find the native extension and choose whether it computes.

The extension is an optional package. Without it, or where it is switched off, torch computes all.
"""

import os
from typing import Any, Literal

from halfmoon_models.errors import ModelError

#: "auto" uses the extension where it is installed; "on" insists on it.
NativeMode = Literal["auto", "on", "off"]

#: Overrides "auto": 0 switches the extension off, 1 insists on it.
SWITCH = "HALFMOON_ENGINE_NATIVE"


class NativeUnavailable(ModelError):
    """The native extension was asked for and is not installed."""


def native_extension(mode: NativeMode = "auto") -> Any | None:
    """Return the extension's module, or None where torch shall compute.

    Raises:
        NativeUnavailable: it is not installed, and `mode` or the environment insists on it.
    """
    if mode == "auto":
        mode = {"0": "off", "1": "on"}.get(os.environ.get(SWITCH, ""), "auto")  # type: ignore[assignment]
    if mode == "off":
        return None
    try:
        import halfmoon_engine_native as native
    except ImportError as error:
        if mode == "on":
            raise NativeUnavailable(
                f"the engine's native extension can't be loaded ({error}); build it with "
                f"`make native`, or unset {SWITCH}"
            ) from error
        return None
    return native
