"""Find the demo model, which is served when none is named; the engine's package holds it."""

from importlib.util import find_spec
from pathlib import Path

#: The demo model's name in requests.
DEMO_MODEL_NAME = "halfmoon-demo"


class DemoModelMissing(Exception):
    """The engine's package, which holds the demo model, is not installed."""


def demo_model_folder() -> Path:
    """Return the demo model's folder.

    Raises:
        DemoModelMissing: it is not on this machine.
    """
    # Looked for without importing it, since this command installs without torch.
    found = find_spec("halfmoon_engine")
    if found is None or found.origin is None:
        raise DemoModelMissing(
            "no model is named, and the demo model comes with halfmoon-engine, which is not "
            "installed here: install it, or name a model of your own"
        )
    return Path(found.origin).parent / "demo" / "model"
