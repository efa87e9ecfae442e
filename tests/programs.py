"""Run our programs to their end, forked where that is what a start would be."""

import subprocess
import sys
import tempfile
from typing import Any

from halfmoon_sandbox.bound_process import start_bound


def run_program(
    *command: str, joined: bool = False, timeout_s: float = 120, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m COMMAND…`` to its end, and return its status and what it printed.

    Args:
        command: the module and its arguments.
        joined: whether what it prints as errors is in its output.
        timeout_s: seconds after which it is killed.
        options: of `start_bound`, such as ``cwd`` and ``env``.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    words = [sys.executable, "-m", *command]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start_bound(
            words, stdout=output, stderr=subprocess.STDOUT if joined else errors, **options
        )
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(
            words, status, output.read().decode(), errors.read().decode()
        )
