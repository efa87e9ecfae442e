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
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.api_reference import UndocumentedPackage, packages, reference_pages

ROOT = Path(__file__).resolve().parents[1]
#: Folders without pages; those with a dot are skipped, too.
_SKIPPED = {"tests", "node_modules", "site", "dist", "build", "__pycache__"}
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def main(output: Path) -> int:
    """Build the site into a folder; return its exit status: 1 where a package has no page."""
    try:
        reference = reference_pages(ROOT)
    except UndocumentedPackage as error:
        print(error, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        for page in _pages():
            _copy(page, pages)
            for linked in _linked_files(page):
                _copy(linked, pages)
        _write_reference(pages / "reference", reference)
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


def _write_reference(folder: Path, pages: Mapping[str, str]) -> None:
    """Write one page per package, which mkdocstrings fills with its docstrings."""
    folder.mkdir(parents=True)
    for name, page in pages.items():
        (folder / f"{name}.md").write_text(page)
    intro = "# API reference\n\nThe public names of each package, from their docstrings.\n\n"
    listed = (f"- [{name}]({name}.md)" for name in pages)
    (folder / "index.md").write_text(intro + "\n".join(listed) + "\n")


def _paths() -> str:
    """Return where mkdocstrings reads the packages, as the end of mkdocs.yml."""
    folders = sorted({str(package.parent) for package in packages(ROOT)})
    return "          paths: [" + ", ".join(f'"{folder}"' for folder in folders) + "]\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
