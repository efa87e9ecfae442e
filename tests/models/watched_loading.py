"""Load each hostile folder of `ways_out` in this process, and write what it opened and asked for.

`python -m tests.models.watched_loading FOLDER` prints a JSON object of the outcomes by name. The
kernel says which files were opened outside, also by libraries that are not Python's.
"""

import ctypes
import json
import logging
import os
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_engine.load import open_engine
from halfmoon_testing.models.llama_folders import make_llama
from tests.models.ways_out import WAYS, write_outside

_IN_OPEN = 0x20
_EVENT = struct.Struct("iIII")
_OUTWARD = ("socket.getaddrinfo", "socket.connect", "subprocess.Popen", "os.system", "os.exec")


class _Watch:
    """Note the files that anything in this machine opens in a folder, and what Python asks for."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _IN_OPEN) >= 0
        self._known = {name.partition(".")[0] for name in (*sys.modules, *sys.stdlib_module_names)}
        self._known.add("halfmoon_engine_native")
        self._asked: list[str] = []
        sys.addaudithook(self._on_event)

    def take(self) -> dict[str, list[str]]:
        """Return what was opened and asked for since the last call."""
        asked, self._asked = self._asked, []
        return {"opened": self._opened(), "asked": sorted(set(asked))}

    def _opened(self) -> list[str]:
        try:
            content = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return []
        names, at = set(), 0
        while at < len(content):
            *_, length = _EVENT.unpack_from(content, at)
            at += _EVENT.size + length
            names.add(os.fsdecode(content[at - length : at].rstrip(b"\0")) or ".")
        return sorted(names)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _OUTWARD:
            self._asked.append(f"{event} {arguments[0] if arguments else ''}")
        elif event == "import" and arguments[0].partition(".")[0] not in self._known:
            self._asked.append(f"import {arguments[0].partition('.')[0]}")


def _refusal(load: Callable[[], object]) -> str:
    try:
        load()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(top: Path) -> None:
    """Load the folder of each way, made below `top`."""
    logging.disable(logging.CRITICAL)
    plain, outside = make_llama(top / "plain"), top / "outside"
    write_outside(outside)
    open_engine(str(plain), block_size=16, device="cpu")
    HubTokenizer(plain)
    watch = _Watch(outside)
    outcomes: dict[str, Any] = {}
    for number, (name, way) in enumerate(WAYS.items()):
        folder = top / str(number)
        way.build(folder, outside)
        watch.take()
        outcomes[name] = {
            "worker": _refusal(partial(open_engine, str(folder), block_size=16, device="cpu")),
            "conductor": _refusal(partial(HubTokenizer, folder)),
            **watch.take(),
        }
    # What the watch would see, so that an empty list means something.
    (outside / "evil.json").read_bytes()
    outcomes["watched"] = watch.take()
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
