"""Write the lock files: every package from elsewhere, with its version and the hashes of its files.

Usage: python -m tools.lock        (needs `uv` on the path, and the package index; `make lock`)

A lock is a requirements file for ``pip install --require-hashes --no-deps``: pip then refuses a
file that is not the one that was looked at here. Versions are those of constraints.txt. torch and
its libraries of CUDA are in no lock: which build of them is right depends on the machine.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "locks"
INDEX = "https://pypi.org/simple"
#: What each lock is for: the folders of our packages, with extras.
GROUPS = {
    "cluster": ["libs/*", "services/*"],
    "conductor": ["libs/runtime[otel]", "services/conductor"],
    "kvstore": ["libs/runtime[otel]", "services/kvstore"],
    "worker": ["libs/runtime[otel]", "services/prefill", "services/decode"],
}
#: What our packages are built with, in an environment of developers.
BUILD = ["hatchling", "editables", "setuptools"]
#: Requirements that are no package's.
FILES = {
    "dev": "requirements-dev.txt",
    "audit": "requirements-audit.txt",
    "docs": "requirements-docs.txt",
}
#: Least versions of Python other than 3.11: what the site is built with asks for a later patch.
_PYTHON = {"docs": "3.11.5"}
_LEFT_OUT = re.compile(r"(torch|triton|nvidia|cuda)\b")
#: Files that Linux and macOS can use, of Python 3.11 or later.
_WANTED = re.compile(
    r"(\.tar\.gz|\.zip|-none-any\.whl"
    r"|-(cp31[1-9]|cp3[0-9]-abi3|cp31[0-9]-abi3|py3)-?.*"
    r"(manylinux\S*_(x86_64|aarch64)|macosx\S*)\.whl)$"
)


def main() -> int:
    """Write all locks; 1 if `uv` found no versions that fit."""
    LOCKS.mkdir(exist_ok=True)
    wanted = {name: third_party(patterns) for name, patterns in GROUPS.items()}
    wanted["cluster"] |= set(BUILD)
    for name, file in FILES.items():
        lines = (ROOT / file).read_text().splitlines()
        wanted[name] = {line.partition("#")[0].strip() for line in lines} - {""}
    try:
        pins = {
            name: list(_resolve(requirements, _PYTHON.get(name, "3.11")))
            for name, requirements in wanted.items()
        }
    except subprocess.CalledProcessError as error:
        print(f"uv found no versions that fit: {error.stderr}", file=sys.stderr)
        return 1
    every = {pin.partition(" ;")[0] for group in pins.values() for pin in group}
    with ThreadPoolExecutor(8) as pool:
        hashes = dict(zip(every, pool.map(_hashes, every), strict=True))
    for name, group in pins.items():
        path = LOCKS / f"{name}.txt"
        path.write_text("".join(_entry(pin, hashes[pin.partition(" ;")[0]]) for pin in group))
        print(f"{path.relative_to(ROOT)}: {len(group)} packages")
    return 0


def third_party(patterns: Iterable[str]) -> set[str]:
    """Return what our packages require from elsewhere, those that they need of ours included.

    Args:
        patterns: folders of packages, perhaps with an extra in brackets.
    """
    ours = {_project(path)["name"]: path for path in ROOT.glob("[ls]*/*/pyproject.toml")}
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()

    def visit(path: Path, extra: str) -> None:
        if (str(path), extra) in seen:
            return
        seen.add((str(path), extra))
        project = _project(path)
        required = project["dependencies"]
        if extra:
            required = [*required, *project["optional-dependencies"][extra]]
        for each in required:
            name, its_extra = re.fullmatch(r"([\w.-]+)(?:\[(\w+)\])?.*", each).groups()  # type: ignore[union-attr]
            if name in ours:
                visit(ours[name], its_extra or "")
            else:
                found.add(each)

    for pattern in patterns:
        folder, _, extra = pattern.rstrip("]").partition("[")
        for path in ROOT.glob(f"{folder}/pyproject.toml"):
            visit(path, extra)
    return found


def _project(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())["project"]  # type: ignore[no-any-return]


def _resolve(requirements: Iterable[str], python: str) -> Iterator[str]:
    """Return pins, perhaps with a marker of the environment, that hold all requirements."""
    with tempfile.NamedTemporaryFile("w", suffix=".in") as source:
        source.write("\n".join(sorted(requirements)))
        source.flush()
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", python]
        command += ["--no-annotate", "--no-header", "--index-url", INDEX, "-c", "constraints.txt"]
        done = subprocess.run(
            [*command, source.name], cwd=ROOT, capture_output=True, text=True, check=True
        )
    for line in done.stdout.splitlines():
        if not _LEFT_OUT.match(line):
            yield line.strip()


def _hashes(pin: str) -> list[str]:
    """Return the hashes of a version's files, as the package index states them."""
    name, _, version = pin.partition("==")
    page = urllib.request.Request(
        f"{INDEX}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(page, timeout=60) as answer:
        files = json.load(answer)["files"]
    spelled = re.compile(rf"{re.sub('[-_.]+', '[-_.]+', name)}-{re.escape(version)}[-.]", re.I)
    found = {
        file["hashes"]["sha256"]
        for file in files
        if spelled.match(file["filename"]) and _WANTED.search(file["filename"])
    }
    if not found:
        raise SystemExit(f"{pin}: the index names no file that fits")
    return sorted(found)


def _entry(pin: str, hashes: list[str]) -> str:
    return " \\\n".join([pin, *[f"    --hash=sha256:{each}" for each in hashes]]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
