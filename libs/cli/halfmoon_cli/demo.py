"""The model that is served when none is named: made once, on this machine."""

import os
import subprocess
import sys
from pathlib import Path


class DemoModelFailed(Exception):
    """It could not be made; the text is the end of what its maker said."""


def demo_model_folder() -> Path:
    """Where it is kept: the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "halfmoon" / "demo-model"


def make_demo_model(folder: Path) -> None:
    """Make it unless it is there and current; takes some seconds the first time.

    Raises:
        DemoModelFailed: its maker failed.
    """
    made = subprocess.run(
        [sys.executable, "-m", "halfmoon_engine.demo_model", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise DemoModelFailed("\n".join((made.stdout + made.stderr).splitlines()[-12:]))
