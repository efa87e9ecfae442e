"""Skip tests that start a program which this machine lacks.

A machine for `make test` has Python, make and a shell. A test that starts anything else says so by
`needs_programs`, or a helper that starts it by `skip_without`;
`tests/architecture/test_started_programs.py` finds those that do neither.
"""

import shutil

import pytest

#: Programs that tests start, with the package that has each.
PACKAGES = {
    "cc": "Debian: gcc",
    "etcd": "Debian: etcd-server",
    "git": "Debian: git",
    "node": "Debian: nodejs",
    "npm": "Debian: npm",
    "prometheus": "Debian: prometheus",
    "redis-server": "Debian: redis-server",
    "setpriv": "Debian: util-linux",
    "tc": "Debian: iproute2",
}


def skip_without(*programs: str) -> None:
    """Skip the test that runs, unless all these programs are on the path."""
    if reason := _why_not(programs):
        pytest.skip(reason)


def needs_programs(*programs: str) -> pytest.MarkDecorator:
    """Return the mark of a test that starts these programs."""
    reason = _why_not(programs)
    return pytest.mark.skipif(bool(reason), reason=reason)


def _why_not(programs: tuple[str, ...]) -> str:
    missing = [program for program in programs if shutil.which(program) is None]
    return ", ".join(f"{each} is not installed ({PACKAGES[each]})" for each in missing)
