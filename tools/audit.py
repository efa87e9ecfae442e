"""Look up known weaknesses of all locked packages, where PyPI's advisories can be had.

Usage: python tools/audit.py LOCK …        (`make audit`)

Exit status: 1 if a package has a weakness that a later version mends, else 0. Without advisories
it says so, and ends well: a mirror of the package index seldom has them.
"""

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

#: A version with a known weakness: its page says whether advisories are served.
_PROBE = "https://pypi.org/pypi/requests/2.31.0/json"


def main(locks: list[str]) -> int:
    """Audit each lock; return the exit status."""
    try:
        urllib.request.urlopen(_PROBE, timeout=20).close()
    except (urllib.error.URLError, OSError) as error:
        print(f"skipped: the package index serves no advisories here ({error})")
        return 0
    pip_audit = Path(sys.executable).with_name("pip-audit")
    command = [str(pip_audit), "--require-hashes", "--disable-pip", "--progress-spinner", "off"]
    for lock in locks:
        command += ["--requirement", lock]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
