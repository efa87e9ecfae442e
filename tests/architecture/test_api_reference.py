"""The API reference has a page of each package, or the build of the docs fails."""

import re
from pathlib import Path

import pytest

from tools import docs_site
from tools.api_reference import PUBLIC, UndocumentedPackage, reference_pages

ROOT = Path(__file__).resolve().parents[2]


def make_package(root: Path, name: str, text: str, *modules: str) -> None:
    folder = root / "libs" / name.removeprefix("halfmoon_") / name
    folder.mkdir(parents=True)
    for file in ("__init__", *modules):
        (folder / f"{file}.py").write_text(text if file == "__init__" else '"""Do something."""\n')


def test_each_package_that_is_published_has_a_page_with_public_names() -> None:
    pages = reference_pages(ROOT)
    published = [*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]
    assert len(pages) == len(published)
    for name, page in pages.items():
        assert f"::: {name}\n" in page, "its docstring"
        assert "members: false" not in page or re.search(rf"^::: {name}\.", page, re.MULTILINE)


NAMED = '"""Export a name."""\n\n__all__ = ["a"]\n'


def test_what_has_no_public_names_or_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    make_package(tmp_path, "halfmoon_named", NAMED)
    make_package(tmp_path, "halfmoon_listed", '"""List a module."""\n', "some")
    make_package(tmp_path, "halfmoon_bare", '"""Say nothing of __all__."""\n', "some")
    make_package(tmp_path, "halfmoon_empty", "")
    with pytest.raises(UndocumentedPackage) as told:
        reference_pages(tmp_path, {"halfmoon_listed": ("some",)})
    for name in ("bare", "empty"):
        assert f"halfmoon_{name} has no page" in str(told.value)
    assert "named" not in str(told.value) and "listed" not in str(told.value)
    public = {"halfmoon_listed": ("some", "other"), "halfmoon_gone": ("some",)}
    with pytest.raises(UndocumentedPackage) as told:
        reference_pages(tmp_path, public)
    assert "no module halfmoon_listed.other" in str(told.value)
    assert "halfmoon_gone: no such package" in str(told.value)


def test_the_build_of_the_docs_fails_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(PUBLIC, "halfmoon_prefill")
    assert docs_site.main(tmp_path / "site") == 1
    assert "halfmoon_prefill has no page" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()
