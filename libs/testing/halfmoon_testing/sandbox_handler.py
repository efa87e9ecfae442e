"""Handle sandboxed requests as a test commands: echo, fail, spin, grow, crash or sleep.

``crash_once PATH`` crashes unless there is a file, which it makes.
"""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path


def make_handler(argument: bytes) -> Callable[[bytes], bytes]:
    """Return a handler whose answers begin with `argument`."""
    match argument:
        case b"broken":
            raise ValueError("this one never loads")
        case b"endless":
            while True:
                pass

    def handle(request: bytes) -> bytes:
        match request.split(b" ", 1)[0]:
            case b"fail":
                raise ValueError("as told")
            case b"spin":
                while True:
                    pass
            case b"grow":
                kept = []
                while True:
                    kept.append(bytearray(1 << 20))
            case b"crash":
                ctypes.string_at(0)
            case b"crash_once":
                marker = Path(os.fsdecode(request.split(b" ", 1)[1]))
                if not marker.exists():
                    marker.touch()
                    ctypes.string_at(0)
            case b"sleep":
                time.sleep(3600)
            case b"pid":
                return str(os.getpid()).encode()
        return argument + request

    return handle
