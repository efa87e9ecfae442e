"""Run only the tests that stay in this process and need no torch: `make test-fast`.

A plugin: `python -m pytest -p tests.one_process`. It keeps no list of tests, but looks at what they
do. A file that imports torch or transformers is skipped as a whole; a test that would start a
process is skipped there and then. So a new test is in or out without a word from its author.
"""

import multiprocessing.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

#: Packages that take seconds to import.
HEAVY = frozenset({"torch", "transformers"})
#: What Python reports before a process is started.
PROCESS_STARTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
)


class _HeavyImports:
    """A finder that skips what imports a heavy package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if name.partition(".")[0] in HEAVY:
            pytest.skip(f"imports {name}", allow_module_level=True)
        return None


def _skip_process_starts(event: str, _: tuple[Any, ...]) -> None:
    if event in PROCESS_STARTS:
        pytest.skip("starts a process", allow_module_level=True)


def _skip_spawn(*_: Any) -> int:
    pytest.skip("starts a process", allow_module_level=True)


def pytest_configure() -> None:
    sys.meta_path.insert(0, _HeavyImports())
    sys.addaudithook(_skip_process_starts)
    # The one way that has no audit event.
    multiprocessing.util.spawnv_passfds = _skip_spawn  # type: ignore[attr-defined]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if imported := HEAVY & sys.modules.keys():
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        raise RuntimeError(f"{', '.join(imported)} was imported in spite of all")
