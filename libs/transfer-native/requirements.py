"""Says which system packages the extension lacks to be built here; ends with 1 if any is."""

import shutil
import sys
import sysconfig
from pathlib import Path

PYTHON_H = Path(sysconfig.get_path("include")) / "Python.h"
XXHASH_H = [Path(folder) / "xxhash.h" for folder in ("/usr/include", "/usr/local/include")]

missing = [
    package
    for package, there in (
        ("gcc", shutil.which("gcc") is not None),
        ("python3-dev", PYTHON_H.exists()),
        ("libxxhash-dev", any(path.exists() for path in XXHASH_H)),
    )
    if not there
]
if missing:
    sys.exit(
        f"the extension needs {', '.join(missing)}: apt-get install {' '.join(missing)}\n"
        "(python3-dev is for Debian's Python; another one brings its own Python.h, here "
        f"{PYTHON_H}). Everything works without it."
    )
