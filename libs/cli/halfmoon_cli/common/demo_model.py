"""The model that is served when none is named: it comes with the engine's package."""

from importlib.util import find_spec
from pathlib import Path

#: Its name as clients write it.
DEMO_MODEL_NAME = "halfmoon-demo"


class DemoModelMissing(Exception):
    """The package that it comes with is not installed."""


def demo_model_folder() -> Path:
    """Where it lies.

    Raises:
        NoDemoModel: not on this machine.
    """
    # Looked for without importing it, since this command installs without torch.
    found = find_spec("halfmoon_engine")
    if found is None or found.origin is None:
        raise DemoModelMissing(
            "no model is named, and the demo model comes with halfmoon-engine, which is not "
            "installed here: install it, or name a model of your own"
        )
    return Path(found.origin).parent / "demo" / "model"
