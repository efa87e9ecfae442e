"""Choose between what every change is tested with and what a night is: `make test-nightly`.

A test of a statistic, of thousands of seeds or of every place of a file is marked
``@pytest.mark.nightly("what it proves that no test by day does")``. It runs at night only; the
run's summary says what it has proved. Other tests take more examples then, by `by_day`.
"""

import os

import pytest

NIGHTLY = "HALFMOON_NIGHTLY"
_PROVES = "proves"


def by_day(n: int, at_night: int) -> int:
    """Return how many examples, seeds or operations to try in this run."""
    return at_night if is_night() else n


def is_night() -> bool:
    """Return whether this run may take hours."""
    return bool(os.environ.get(NIGHTLY))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "nightly(proves): runs with HALFMOON_NIGHTLY=1 only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out by day what is for the night."""
    for item in items:
        if (mark := item.get_closest_marker("nightly")) is not None:
            item.user_properties.append((_PROVES, mark.args[0]))
    if is_night():
        return
    left_out = [item for item in items if item.get_closest_marker("nightly") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("nightly") is None]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the tests of the night have proved."""
    reports = terminalreporter.getreports("passed")
    proved = {
        value for report in reports for name, value in report.user_properties if name == _PROVES
    }
    if proved:
        terminalreporter.section("proved by night alone")
        for sentence in sorted(proved):
            terminalreporter.line(f"- {sentence}")
