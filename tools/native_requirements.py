"""Say which system packages an optional extension lacks to be built here; end with 1 if any is.

Usage: python tools/native_requirements.py transfer-native|engine-native
"""

import shutil
import sys
import sysconfig
from pathlib import Path

PYTHON_H = Path(sysconfig.get_path("include")) / "Python.h"
XXHASH_H = [Path(folder) / "xxhash.h" for folder in ("/usr/include", "/usr/local/include")]

#: Debian's packages by extension, and whether each one's files are there.
NEEDED = {
    "transfer-native": (
        ("gcc", shutil.which("gcc") is not None),
        ("python3-dev", PYTHON_H.exists()),
        ("libxxhash-dev", any(path.exists() for path in XXHASH_H)),
    ),
    "engine-native": (
        ("g++", shutil.which("g++") is not None),
        ("python3-dev", PYTHON_H.exists()),
    ),
}


def main(extension: str) -> None:
    """Name what is missing for one extension."""
    missing = [package for package, there in NEEDED[extension] if not there]
    if missing:
        sys.exit(
            f"{extension} needs {', '.join(missing)}: apt-get install {' '.join(missing)}\n"
            "(python3-dev is for Debian's Python; another one brings its own Python.h, here "
            f"{PYTHON_H}). Everything works without it, more slowly."
        )


if __name__ == "__main__":
    main(sys.argv[1])
