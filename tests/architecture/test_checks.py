"""The checks of names, circles and prose find what they are for."""

import re
from pathlib import Path
from typing import Any

import pytest

from tools.checks import circles, names, prose


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "libs/moon/halfmoon_moon"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    return folder


def write(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)


def faults_of(check: Any, package: Path, **sources: str) -> list[str]:
    write(package, **sources)
    found = check.faults(package.parents[2])
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(
    ("check", "sources", "words"),
    [
        (names, dict.fromkeys("ab", "class Lease: ...\nclass _Own: ..."),
         "class Lease is defined in halfmoon_moon.a and halfmoon_moon.b"),
        (names, {"tcp__frames": "", "rdma__frames": ""}, "frames occurs twice in halfmoon_moon"),
        (circles, {"left__one": "from halfmoon_moon.right.two import X", "right__two": "X = 1",
                   "right__three": "from halfmoon_moon.left.four import Y", "left__four": "Y = 1"},
         "packages import in a circle"),
        (prose, {"a": '"""What a lease tells."""'}, "begin with a verb"),
        (prose, {"a": 'def f() -> None:\n    """The oldest lease."""'}, "begin with a verb"),
        (prose, {"a": '"""Drop leases of whoever left."""'}, "no person"),
        (prose, {"a": "# nobody reads this"}, "no person"),
        (prose, {"a": f'"""Count {"leases and " * 13}pins."""'}, "28 words in a sentence"),
    ],
)  # fmt: skip
def test_a_name_of_two_a_circle_or_hard_prose_is_named(
    package: Path, check: Any, sources: dict[str, str], words: str
) -> None:
    (fault,) = faults_of(check, package, **sources)
    assert words in fault


@pytest.mark.parametrize(
    "back",
    [
        "from halfmoon_moon.a import A",
        "def f() -> None:\n    from halfmoon_moon import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import halfmoon_moon.a",
    ],
)
def test_a_circle_of_files_is_found_however_the_import_is_hidden(package: Path, back: str) -> None:
    told = "\n".join(faults_of(circles, package, a="from halfmoon_moon.b import B", b=back))
    assert re.search(r"halfmoon_moon\.(a → halfmoon_moon\.b|b → halfmoon_moon\.a)", told)


@pytest.mark.parametrize(
    ("check", "sources"),
    [
        (circles, {"a": "from halfmoon_moon.b import B", "b": "import halfmoon_moon.c", "c": ""}),
        (prose, {"a": '"""Return the oldest lease."""'}),
        (prose, {"a": 'class Lease:\n    """A promise."""\n    @property\n    def age(self):\n'
                      '        """The seconds since its start."""\n        return 1'}),
        (prose, {"a": f'"""Draw a plan.\n\n    {"a ▶ b " * 30}\n"""'}),
        (prose, {"a": f'"""Call it with `{"x " * 40}`."""'}),
    ],
)  # fmt: skip
def test_imports_one_way_plain_prose_drawings_and_code_are_no_fault(
    package: Path, check: Any, sources: dict[str, str]
) -> None:
    assert faults_of(check, package, **sources) == []


def test_a_cell_with_more_than_one_fact_is_named(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"| a | {'one fact and ' * 9} |\n")
    (fault,) = prose.faults(tmp_path)
    assert "27 words in a cell" in fault
