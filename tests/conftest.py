"""Set up what all tests share: hypothesis, workers of one run, required tests, metadata server."""

import gc
import os
import random
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from halfmoon_metadata import MemoryStore, tcp_ports
from halfmoon_sandbox import bound_process
from halfmoon_testing.processes.forked_starts import ForkTemplate, unforked

pytest_plugins = ["tests.nightly", "tests.durations"]

# No test asserts a time, so neither does hypothesis; fixtures shared by its examples are meant
# to be; a failure prints how to have it again.
settings.register_profile(
    "halfmoon",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
settings.load_profile("halfmoon")

# GNU readline, which pytest imports, writes the terminal's size into the environment. Consoles
# that are made later would keep it, whatever a test sets.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

#: Equal in all workers of one run, so that they draw the same tests.
RUN_ID = os.environ.get("PYTEST_XDIST_TESTRUNUID") or secrets.token_hex(8)
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # The workers share the cores: one thread for each worker's torch, and for processes it starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A port is chosen seconds before a process listens there: each worker has ports of its own.
    n_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    # One that replaces a worker that ended has the next number.
    number = int(worker.removeprefix("gw")) % n_workers
    others = (port for port in range(1 << 16) if port % n_workers != number)
    tcp_ports._given.update(others)


def pytest_configure() -> None:
    """Collect no garbage while modules are imported: half of that time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage again, but leave out what the imports made: it stays."""
    gc.freeze()
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test marked with `random_seeds(n)` a `seed`, n times."""
    if (mark := metafunc.definition.get_closest_marker("random_seeds")) is not None:
        dice = random.Random(f"{RUN_ID} {metafunc.definition.nodeid}")
        metafunc.parametrize("seed", [dice.randrange(1 << 32) for _ in range(mark.args[0])])


#: Test files, separated by spaces, in which a skip is a failure: where all that they need is said
#: to be installed, a test that does not run is a mistake.
REQUIRED = "HALFMOON_REQUIRE"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a failure of a skipped test that must run."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and _is_required(item.path):
        report.outcome = "failed"
        report.longrepr = _why_failed(report.longrepr)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a file that is skipped as a whole."""
    report = yield
    if report.skipped and _is_required(collector.path):
        report.outcome = "failed"
        report.longrepr = _why_failed(report.longrepr)
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Name a failed test at once: a run that is ended by force prints no summary."""
    if not report.failed:
        return None
    crash = getattr(report.longrepr, "reprcrash", None)
    why = (crash.message if crash else str(report.longrepr)).partition("\n")[0]
    kind, letter = ("failed", "F") if report.when in ("call", "???") else ("error", "E")
    return kind, f"\n{letter} {report.nodeid}: {why[:300]}\n", kind.upper()


def _is_required(path: Path) -> bool:
    names = os.environ.get(REQUIRED, "").split()
    return any(path.as_posix().endswith(f"/{name}") for name in names)


def _why_failed(skipped: object) -> str:
    reason = skipped[-1] if isinstance(skipped, tuple) else skipped
    return f"it was skipped, and {REQUIRED} says that it must run: {reason}"


@pytest.fixture
def metadata_url() -> Iterator[str]:
    """An empty metadata store behind a server, in a thread, for what runs in processes."""
    from tests.metadata.conftest import HttpServer

    server = HttpServer(MemoryStore())
    yield f"http://127.0.0.1:{server.port}/"
    server.stop()


#: Set where programs are started as users start them: with other libraries, or by slow machines.
UNFORKED = "HALFMOON_UNFORKED"


@pytest.fixture(scope="session", autouse=True)
def forked_programs() -> Iterator[None]:
    """Fork services and commands from one process that has imported what they import."""
    if os.environ.get(UNFORKED):
        yield
        return
    template = ForkTemplate()
    bound_process.fork = template.fork
    yield
    bound_process.fork = None
    template.close()


@pytest.fixture
def started_programs() -> Iterator[None]:
    """Start services and commands as users do, by an interpreter for each."""
    with unforked():
        yield
