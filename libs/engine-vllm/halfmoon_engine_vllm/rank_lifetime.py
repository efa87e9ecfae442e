"""End a rank's process with the process of its engine, and leave no files behind.

vLLM's own ranks notice that too, but not while they wait for each other in shared memory: a rank
whose neighbour was killed waits there for ever, with a full core.
"""

import multiprocessing
import os
import threading
from pathlib import Path

#: Seconds for vLLM's own end of a rank, which also frees its queues.
_OWN_END_S = 2.0
#: Exit status of a rank whose engine's process ended.
_ORPHANED = 1


def end_with_parent() -> None:
    """Exit this process, from a thread, some time after its parent process has ended.

    Does nothing in a process that `multiprocessing` did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        threading.Event().wait(_OWN_END_S)
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="engine watch", daemon=True).start()


def leave_no_files(init_method: str) -> None:
    """Remove names of files that all ranks have opened, so that nothing stays when all are killed.

    The shared memory of vLLM's collectives lives on until its last process ends.

    Args:
        init_method: of `torch.distributed`; the file of a ``file://`` is removed.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
    for path in mapped:
        if path.rstrip("0123456789").endswith("-cpushm_"):
            Path(path).unlink(missing_ok=True)
    if init_method.startswith("file://"):
        Path(init_method.removeprefix("file://")).unlink(missing_ok=True)
