"""The checks of names, circles and prose find what they are for."""

from pathlib import Path

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


def test_a_public_class_that_is_defined_twice_is_named_with_both_places(package: Path) -> None:
    write(package, a="class Lease: ...\nclass _Own: ...", b="class Lease: ...\nclass _Own: ...")
    (fault,) = names.faults(package.parents[2])
    assert "class Lease is defined in halfmoon_moon.a and halfmoon_moon.b" in fault


def test_a_module_name_that_occurs_twice_in_a_distribution_is_named(package: Path) -> None:
    write(package, tcp__frames="", rdma__frames="")
    (fault,) = names.faults(package.parents[2])
    assert "module frames occurs twice in halfmoon_moon" in fault


@pytest.mark.parametrize(
    "back",
    [
        "from halfmoon_moon.a import A",
        "def f() -> None:\n    from halfmoon_moon import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import halfmoon_moon.a",
    ],
)
def test_a_circle_of_files_is_found_however_the_import_is_hidden(package: Path, back: str) -> None:
    write(package, a="from halfmoon_moon.b import B", b=back)
    found = circles.faults(package.parents[2])
    assert any("halfmoon_moon.a → halfmoon_moon.b" in fault for fault in found) or any(
        "halfmoon_moon.b → halfmoon_moon.a" in fault for fault in found
    )


def test_a_circle_of_packages_without_one_of_files_is_found(package: Path) -> None:
    write(
        package,
        left__one="from halfmoon_moon.right.two import X",
        right__two="X = 1",
        right__three="from halfmoon_moon.left.four import Y",
        left__four="Y = 1",
    )
    (fault,) = circles.faults(package.parents[2])
    assert fault.startswith("packages import in a circle")


def test_imports_that_go_one_way_are_no_fault(package: Path) -> None:
    write(package, a="from halfmoon_moon.b import B", b="import halfmoon_moon.c", c="")
    assert circles.faults(package.parents[2]) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ('"""What a lease tells."""', "begin with a verb"),
        ('def f() -> None:\n    """The oldest lease."""', "begin with a verb"),
        ('"""Drop leases of whoever left."""', "no person"),
        ("# nobody reads this", "no person"),
        (f'"""Count {"leases and " * 13}pins."""', "28 words in a sentence"),
    ],
)
def test_prose_that_a_newcomer_would_stumble_over_is_named(
    package: Path, source: str, fault: str
) -> None:
    write(package, a=source)
    (found,) = prose.faults(package.parents[2])
    assert fault in found


@pytest.mark.parametrize(
    "source",
    [
        '"""Return the oldest lease."""',
        'class Lease:\n    """A promise."""\n    @property\n    def age(self) -> int:\n'
        '        """The seconds since its start."""\n        return 1',
        f'"""Draw a plan.\n\n    {"a ▶ b " * 30}\n"""',
        f'"""Call it with `{"x " * 40}`."""',
    ],
)
def test_plain_prose_drawings_and_code_are_no_fault(package: Path, source: str) -> None:
    write(package, a=source)
    assert prose.faults(package.parents[2]) == []


def test_a_cell_with_more_than_one_fact_is_named(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"| a | {'one fact and ' * 9} |\n")
    (fault,) = prose.faults(tmp_path)
    assert "27 words in a cell" in fault
