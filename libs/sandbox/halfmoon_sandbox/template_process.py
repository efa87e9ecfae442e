"""Run the template process: load the handler once, then fork a child for each descriptor.

Runs as ``python -m halfmoon_sandbox.template_process <control fd> <factory> <memory bytes>
<niceness> <processor seconds to load>``.
It has one thread and no requests, and ends when its owner's end of the control socket closes; the
kernel ends its children with it. Children are reaped only on request: no other process can take a
child's id before its owner knows of the end.
"""

import contextlib
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from halfmoon_sandbox import frames
from halfmoon_sandbox.control_protocol import (
    ANSWER_FORMAT,
    BROKEN,
    COMMAND_FORMAT,
    FORK,
    KILL,
    NO_CHILD,
    OUT_OF_MEMORY_STATUS,
    PID,
    READY,
    WAIT,
)
from halfmoon_sandbox.parent_death import end_with

Handler = Callable[[bytes], bytes]

#: Address space in which the handler is loaded, and more for each core: a thread of a library has a
#: stack and an arena, most of which it never touches.
_LOAD_MEMORY_BYTES = 6 * 1024**3
_LOAD_MEMORY_BYTES_PER_CORE = 96 * 1024**2
#: Seconds between two checks whether a killed child has ended.
_REAP_S = 0.05


def main() -> None:
    """Load the handler, report it, and serve the owner until it closes the control socket."""
    descriptor, factory, memory_bytes, niceness, load_cpu_s = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    control = socket.socket(fileno=int(descriptor))
    argument = frames.receive_frame(control)
    if argument is None:
        return
    try:
        with _load_limits(float(load_cpu_s)):
            handler = load_handler(factory, argument)
    except BaseException as error:  # a panic of native code is no `Exception`
        with contextlib.suppress(ConnectionError):
            problem = f"{type(error).__name__}: {error}".encode()
            control.sendall(frames.encode_frame(BROKEN, problem))
        return
    gc.collect()
    gc.freeze()  # children share these pages: no collection touches them
    with contextlib.suppress(ConnectionError):  # the owner may end with answers unread
        control.sendall(frames.encode_frame(READY))
        _serve(control, handler, int(memory_bytes), int(niceness))


@contextlib.contextmanager
def _load_limits(cpu_s: float) -> Iterator[None]:
    """Bound processor time and address space: a factory may read what a stranger made."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _LOAD_MEMORY_BYTES + _LOAD_MEMORY_BYTES_PER_CORE * (os.cpu_count() or 1)
    if soft != resource.RLIM_INFINITY:
        most = min(soft, most)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def load_handler(factory: str, argument: bytes) -> Handler:
    """Make a handler of an argument with ``module:function``."""
    module, _, name = factory.partition(":")
    handler: Handler = getattr(importlib.import_module(module), name)(argument)
    return handler


def _serve(control: socket.socket, handler: Handler, memory_bytes: int, niceness: int) -> None:
    own = os.getpid()
    #: Process ids of children, by the owner's numbers; and of those that were killed.
    children: dict[int, int] = {}
    dying: set[int] = set()
    while (command := _receive_command(control, dying)) is not None:
        verb, number, descriptor = command
        if verb == FORK:
            try:
                pid = os.fork()
            except OSError:
                pid = -1  # the owner finds its end closed, and asks
            if pid == 0:
                control.close()
                end_with(own)
                run_child(socket.socket(fileno=descriptor), handler, memory_bytes, niceness)
            os.close(descriptor)
            if pid > 0:
                children[number] = pid
        elif verb == PID:
            control.sendall(ANSWER_FORMAT.pack(children.get(number, 0)))
        elif verb == WAIT:
            status = NO_CHILD
            if (pid := children.pop(number, 0)) > 0:
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            control.sendall(ANSWER_FORMAT.pack(status))
        elif verb == KILL and (pid := children.pop(number, 0)) > 0:
            os.kill(pid, signal.SIGKILL)
            dying.add(pid)


def _receive_command(control: socket.socket, dying: set[int]) -> tuple[bytes, int, int] | None:
    """Return the owner's next command, with a descriptor or -1; None at the end."""
    while True:
        for pid in list(dying):
            if os.waitpid(pid, os.WNOHANG)[0]:
                dying.discard(pid)
        if select.select([control], [], [], _REAP_S if dying else None)[0]:
            break
    data, descriptors, _, _ = socket.recv_fds(control, COMMAND_FORMAT.size, 1)
    while 0 < len(data) < COMMAND_FORMAT.size:
        data += control.recv(COMMAND_FORMAT.size - len(data)) or b"\0" * COMMAND_FORMAT.size
    if not data:
        return None
    verb, number = COMMAND_FORMAT.unpack_from(data)
    return verb, number, descriptors[0] if descriptors else -1


def run_child(
    connection: socket.socket, handler: Handler, memory_bytes: int, niceness: int
) -> None:
    """Serve requests in a forked child until its owner closes the connection; never returns."""
    exit_code = 1
    try:
        _limit(memory_bytes, niceness)
        while (request := frames.receive_frame(connection)) is not None:
            (cpu_s,) = frames.REQUEST.unpack_from(request)
            began_s = time.process_time()
            # The kernel ends the process by SIGPROF once the call has used this much.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            status, payload = _answer(handler, request[frames.REQUEST.size :])
            signal.setitimer(signal.ITIMER_PROF, 0)
            used_s = time.process_time() - began_s
            connection.sendall(frames.encode_frame(frames.RESPONSE.pack(status, used_s), payload))
        exit_code = 0
    except MemoryError:
        exit_code = OUT_OF_MEMORY_STATUS
    finally:
        os._exit(exit_code)  # nothing of the template's is cleaned up twice


def _answer(handler: Handler, request: bytes) -> tuple[int, bytes]:
    try:
        return frames.OK, handler(request)
    except MemoryError:
        raise
    except Exception as error:
        return frames.FAILED, str(error).encode("utf-8", "replace")


def _limit(memory_bytes: int, niceness: int) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    used_bytes = n_pages * resource.getpagesize()
    most = used_bytes + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.nice(niceness)
    # Output of a library about a hostile input belongs into no log.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


if __name__ == "__main__":
    main()
