"""What our code expects of another package is compared with it, and the difference is named."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon_engine_vllm.interface_checks import (
    Called,
    Expectation,
    Holds,
    Implemented,
    Overridden,
)

THEIRS = """
from abc import ABC, abstractmethod
from dataclasses import dataclass

def run(task, *, wait, limit=None): ...
def take(**more): ...

@dataclass
class Settings:
    size: int
    name: str = ""

class Engine:
    kind: str

    def __init__(self, settings):
        self.settings = settings
        self.pages: list[int] = []

    def step(self, batch, done=False): ...

    @staticmethod
    def build(settings): ...

class Hook(ABC):
    @abstractmethod
    def before(self): ...

    def after(self, batch, **more): ...
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of others: `theirs.parts`, and `theirs.broken`, which can't be imported."""
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text(THEIRS)
    (package / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "expectation",
    [
        Called("theirs.parts.run", ("task",), ("wait",)),
        Called("theirs.parts.take", by_name=("anything",)),
        Called("theirs.parts.Settings", by_name=("size", "name")),
        Called("theirs.parts.Engine.step", ("batch",)),
        Called("theirs.parts.Engine.build", ("settings",)),
        Overridden("theirs.parts.Hook.after", ("batch", "more")),
        Overridden("theirs.parts.Engine.__init__", ("settings",)),
        Holds("theirs.parts.Settings", ("size",)),
        Holds("theirs.parts.Engine", ("kind", "settings", "pages", "step")),
        Holds("theirs.parts", ("Engine",)),
        Implemented("theirs.parts.Hook", ("before",)),
    ],
    ids=repr,
)
def test_what_is_as_expected_has_no_difference(theirs: Path, expectation: Expectation) -> None:
    assert not expectation.difference()


@pytest.mark.parametrize(
    ("expectation", "difference"),
    [
        (Called("theirs.parts.run", ("job",), ("wait",)), "parameter `job` is gone, `task` is in"),
        (Called("theirs.parts.run", ("task",), ("wait", "now")), "parameter `now` is gone"),
        (Called("theirs.parts.run", ("task",)), "parameter `wait` is new, and must be given"),
        (Called("theirs.parts.run", ("wait",)), "`wait` is number 2, it was 1"),
        (Called("theirs.parts.Engine.stop"), "`stop` of theirs.parts.Engine is gone"),
        (Called("theirs.parts.Motor.step"), "`Motor` of theirs.parts is gone"),
        (Called("theirs.pieces.run"), "`pieces` of theirs is gone"),
        (Called("nobodys.run"), "nobodys is not installed"),
        (Called("theirs.broken.run"), "it can't be imported: No module named 'nothing"),
        (Overridden("theirs.parts.Hook.after", ("batch",)), "parameter `more` is new"),
        (Overridden("theirs.parts.Hook.after", ("runs", "more")), "parameter `runs` is gone"),
        (Overridden("theirs.parts.Hook.between", ()), "`between` of theirs.parts.Hook is gone"),
        (Holds("theirs.parts.Settings", ("size", "colour")), "attribute `colour` is gone"),
        (Holds("theirs.parts.Engine", ("page",)), "attribute `page` is gone"),
        (Holds("theirs.parts.Motor", ("page",)), "`Motor` of theirs.parts is gone"),
        (Implemented("theirs.parts.Hook", ("after",)), "method `before` is new"),
        (Implemented("theirs.parts.Crook", ()), "`Crook` of theirs.parts is gone"),
    ],
    ids=repr,
)
def test_what_moved_is_named(theirs: Path, expectation: Expectation, difference: str) -> None:
    found = expectation.difference()
    assert difference in found
    assert found.startswith(f"{expectation.path}: ")
