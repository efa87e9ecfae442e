"""Import modules once, then become a program for each request to start one.

Runs as ``python -m halfmoon_testing.processes.fork_template <descriptor> <module>…``. The
descriptor is its owner's channel. A program gets one of its own, by which it starts others:

    owner ──channel──▶ template ── fork ──▶ halfmoon up ──channel──▶ template ── fork ──▶ services

What was started over a channel is killed when that closes, at the end of its owner however that
comes. A child is reaped only when its owner asks: no other process can take its id before the owner
knows of its end. The template has one thread, since a fork has only that one.
"""

import faulthandler
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from halfmoon_engine.torch_threads import limit_spin_waits
from halfmoon_sandbox import bound_process
from halfmoon_sandbox.parent_death import end_with
from halfmoon_testing.processes.forked_starts import (
    MAX_REQUEST_BYTES,
    N_DESCRIPTORS,
    ForkChannel,
    open_channel,
)


class Program(NamedTuple):
    """Hold what a child becomes: a request, and its own channel."""

    request: dict[str, Any]
    channel: socket.socket


def main() -> None:
    """Import everything, serve the owner, and run a program in each child."""
    descriptor, *preloaded = sys.argv[1:]
    owner = socket.socket(fileno=int(descriptor))
    before = dict(os.environ)
    limit_spin_waits()
    for name in preloaded:
        importlib.import_module(name)
    n_threads = len(list(Path("/proc/self/task").iterdir()))
    if n_threads != 1:
        raise RuntimeError(f"{n_threads} threads run after the imports: a fork would lose them")
    gc.collect()
    gc.freeze()  # no collection touches what children share
    if (program := _serve(owner)) is not None:
        _become(program, before)


def _serve(owner: socket.socket) -> Program | None:
    """Fork and reap as owners ask; return the program to run in a child, None at the end."""
    own = os.getpid()
    #: Process ids of children that were not reaped, by the channel that asked for them.
    children: dict[socket.socket, set[int]] = {owner: set()}
    while owner in children:
        for channel in select.select(list(children), [], [])[0]:
            data, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, N_DESCRIPTORS)
            if not data:
                for pid in children.pop(channel):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                channel.close()
                continue
            request = json.loads(data)
            if (ended := request.get("reap")) is not None:
                children[channel].remove(ended)
                answer = os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1])
                channel.send(json.dumps(answer).encode())
                continue
            mine, theirs = open_channel()
            pid = os.fork()
            if pid == 0:
                end_with(own)
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
            for descriptor in descriptors:
                os.close(descriptor)
            if pid == 0:
                for each in (*children, mine):
                    each.close()
                return Program(request, theirs)
            theirs.close()
            children[mine] = set()
            children[channel].add(pid)
            channel.send(json.dumps(pid).encode())
    return None


def _become(program: Program, template_environment: dict[str, str]) -> None:
    """Run a module as ``python -m`` does, or a file, in this process."""
    request = program.request
    if request["start_new_session"]:
        os.setsid()
    for limit, values in request["limits"].items():
        resource.setrlimit(int(limit), tuple(values))
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    bound_process.fork = ForkChannel(program.channel, template_environment).fork
    words = request["program"]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.modules.pop(f"{sys.argv[0]}.__main__", None)  # else a warning says that it is there
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
