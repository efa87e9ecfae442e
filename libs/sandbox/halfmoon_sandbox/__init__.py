"""Run work on untrusted input in child processes with limits of CPU time and memory.

    sandbox = Sandbox("package.module:make_handler", argument, memory_bytes=512 * MIB)
    child = sandbox.fork()                      # a few milliseconds
    answer = child.call(request, cpu_s=2.0)     # or: await child.call_async(request, cpu_s=2.0)
    child.close()

`Sandbox` starts one template process that imports the handler's module and calls
``make_handler(argument)`` once. Each `Child` is a fork of it and runs ``handler(request)``. A
call that passes its limits, or crashes, ends its child alone and raises `LimitExceeded`. A child
that is ended from outside raises `ChildLost`, which says nothing about the request.
"""

from halfmoon_sandbox.child import Child
from halfmoon_sandbox.child_pool import ChildPool
from halfmoon_sandbox.errors import (
    ChildLost,
    ChildStalled,
    ChildUnavailable,
    HandlerFailed,
    LimitExceeded,
    LoadFailed,
    SandboxError,
)
from halfmoon_sandbox.sandbox import Sandbox

__all__ = [
    "Child",
    "ChildLost",
    "ChildPool",
    "ChildStalled",
    "ChildUnavailable",
    "HandlerFailed",
    "LimitExceeded",
    "LoadFailed",
    "Sandbox",
    "SandboxError",
]
