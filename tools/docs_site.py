"""Build the documentation as a site: all pages, a search, an API reference. It needs no network.

Usage: python -m tools.docs_site OUTPUT    (`make docs` makes its environment and calls it)

Pages keep their paths, so links between them work here as they do in a checkout. Files that pages
link to, such as sources and schemas, are copied beside them.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Folders without pages; those with a dot are skipped, too.
_SKIPPED = {"tests", "node_modules", "site", "dist", "build", "__pycache__"}
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
#: Modules whose names others may use, besides what a package itself exports.
_PUBLIC = {
    "halfmoon_protocol": (
        "blocks",
        "bounds",
        "codec",
        "error_codes",
        "errors",
        "features",
        "kv_events",
        "kv_layout",
        "messages",
        "objects",
        "regions",
        "sampling",
        "stage_layers",
        "versions",
    ),
    "halfmoon_scheduling": ("commands", "config", "events"),
    "halfmoon_transfer": ("interface", "settings"),
}


def main(output: Path) -> int:
    """Build the site into a folder; return the exit status of mkdocs."""
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        for page in _pages():
            _copy(page, pages)
            for linked in _linked_files(page):
                _copy(linked, pages)
        _write_reference(pages / "reference")
        settings = Path(folder) / "mkdocs.yml"
        settings.write_text((ROOT / "mkdocs.yml").read_text() + _paths())
        build = ["-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", str(settings)]
        done = subprocess.run(
            [sys.executable, *build, "--site-dir", str(output.resolve())],
            env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        )
    if done.returncode == 0:
        print(f"written to {output}; make docs-serve shows it")
    return done.returncode


def _pages() -> Iterator[Path]:
    """Yield all pages and pictures, but those of tests and of what others have installed here."""
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if name not in _SKIPPED and not name.startswith(".")]
        for name in names:
            if name.endswith((".md", ".png", ".svg")):
                yield Path(folder, name)


def _linked_files(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to and that are no pages."""
    if page.suffix != ".md":
        return
    for link in _LINK.findall(page.read_text()):
        target = (page.parent / link).resolve()
        if target.is_file() and target.is_relative_to(ROOT) and target.suffix != ".md":
            yield target


def _copy(source: Path, pages: Path) -> None:
    relative = source.relative_to(ROOT)
    target = pages / ("index.md" if relative == Path("README.md") else relative)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write_reference(folder: Path) -> None:
    """Write one page per package, which mkdocstrings fills with what the package exports."""
    folder.mkdir(parents=True)
    listed = []
    for package in sorted(ROOT.glob("*/*/halfmoon_*/__init__.py")):
        name = package.parent.name
        modules = [f"{name}.{module}" for module in _PUBLIC.get(name, ())]
        if "__all__" in package.read_text():
            modules.insert(0, name)
        if not modules:
            continue
        blocks = "\n\n".join(f"::: {module}" for module in modules)
        (folder / f"{name}.md").write_text(f"# {name}\n\n{blocks}\n")
        listed.append(f"- [{name}]({name}.md)")
    intro = "# API reference\n\nThe public names of each package, from their docstrings.\n\n"
    (folder / "index.md").write_text(intro + "\n".join(listed) + "\n")


def _paths() -> str:
    """Return where mkdocstrings reads the packages, as the end of mkdocs.yml."""
    folders = sorted(
        {str(package.parents[1]) for package in ROOT.glob("*/*/halfmoon_*/__init__.py")}
    )
    return "          paths: [" + ", ".join(f'"{folder}"' for folder in folders) + "]\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
