"""Import modules once, then become a service for each request to start one.

Runs as ``python -m halfmoon_testing.processes.fork_template <control fd> <module>…``. It has one
thread, and ends when its owner's end of the socket closes; the kernel ends its children with it.
A child is reaped only when the owner asks: no other process can take its id before the owner knows
of its end.
"""

import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from halfmoon_engine.torch_threads import limit_spin_waits
from halfmoon_sandbox.parent_death import end_with

#: Of one request: a program's arguments and its environment.
MAX_REQUEST_BYTES = 192 * 1024
#: Standard input, output and error of the program.
N_DESCRIPTORS = 3


def main() -> None:
    """Import everything, serve the owner, and run a program in each child."""
    descriptor, *preloaded = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    limit_spin_waits()
    for name in preloaded:
        importlib.import_module(name)
    n_threads = len(list(Path("/proc/self/task").iterdir()))
    if n_threads != 1:
        raise RuntimeError(f"{n_threads} threads run after the imports: a fork would lose them")
    gc.collect()
    gc.freeze()  # no collection touches what children share
    if (program := _serve(control)) is not None:
        control.close()
        _become(program)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork and reap as the owner asks; return the program to run in a child, None at the end."""
    own = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, N_DESCRIPTORS)
        if not data:
            return None
        request = json.loads(data)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            control.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            end_with(own)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid == 0:
            return dict(request)
        control.send(json.dumps(pid).encode())


def _become(program: dict[str, Any]) -> None:
    """Run a module as ``python -m`` does, or a file, in this process."""
    if program["start_new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(program["env"])
    os.chdir(program["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if program["program"][0] == "-m":
        sys.argv = program["program"][1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program["program"]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
