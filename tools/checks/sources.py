"""Find the Python files of our packages."""

from collections.abc import Iterator
from pathlib import Path


def package_folders(root: Path) -> Iterator[Path]:
    """Yield each folder of importable code, such as ``libs/engine/halfmoon_engine``."""
    for group in ("libs", "services"):
        yield from sorted(root.glob(f"{group}/*/halfmoon_*/"))


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the dotted name and the file of every module in `libs/` and `services/`."""
    for folder in package_folders(root):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path
