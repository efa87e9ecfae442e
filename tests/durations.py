"""Keep how long each file's tests take, and begin with the longest: `.ci/durations.json`.

A run of all tests writes it; it names files of two seconds and more. So that it seldom changes, a
file keeps its value until its tests take twice or half as long. Without that order a test of a
minute may begin last, and one core waits for it.

`pytest --quick` (`make test-fast`) leaves out the files that it names, and tests of live clusters.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.nightly import is_night

_ROOT = Path(__file__).resolve().parents[1]
KEPT = _ROOT / ".ci" / "durations.json"
_LEAST_S = 2.0


class DurationRecorder:
    """Sum up the seconds of each file's tests in this run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of one phase of a test."""
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Keep them, after a run of all tests to its end."""
        kept = read_durations()
        renewed = renewed_durations(kept, self.seconds)
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if ended and renewed != kept:
            KEPT.write_text(json.dumps(renewed, indent=1, sort_keys=True) + "\n")


@cache
def read_durations() -> dict[str, float]:
    """Return the seconds of each file; nothing where none are kept."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def renewed_durations(kept: Mapping[str, float], seen: Mapping[str, float]) -> dict[str, float]:
    """Return what to keep after a run of all tests in which each file took so long."""
    return {
        file: kept[file]
        if file in kept and kept[file] / 2 <= seconds <= kept[file] * 2
        else round(seconds)
        for file, seconds in seen.items()
        if seconds >= (_LEAST_S / 2 if file in kept else _LEAST_S)
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick`."""
    told = f"leave out files whose tests took {_LEAST_S:g} s and more, and those of live clusters"
    parser.addoption("--quick", action="store_true", help=told)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what takes long, without importing it."""
    if not config.option.quick or not collection_path.is_relative_to(_ROOT):
        return None
    return str(collection_path.relative_to(_ROOT)) in read_durations() or None


def pytest_configure(config: pytest.Config) -> None:
    """Record where all tests run; workers of xdist report to one process."""
    option = config.option
    is_part = option.keyword or option.quick or option.collectonly or is_night()
    is_part |= config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if not is_part and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder(), "durations")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; each file's tests stay together."""
    if config.option.quick:
        items[:] = [item for item in items if item.get_closest_marker("e2e") is None]
    kept = read_durations()
    items.sort(key=lambda item: -kept.get(item.nodeid.partition("::")[0], 0.0))
