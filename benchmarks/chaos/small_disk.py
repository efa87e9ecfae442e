"""Make a small file system for a kvstore's folder, and fill it: needs the right to mount a tmpfs.

A kvstore allocates its files when it makes them, so that a full file system does not harm them.
Others do not keep such a promise: snapshots, compression and thin volumes need room for each write.
`fill` brings this about: it takes the room of slots away from the files, and fills what is left.
"""

import ctypes
import os
import random
import subprocess
from contextlib import suppress
from pathlib import Path

from halfmoon_kvstore.disk_tier.segment_file import scan_blocks
from halfmoon_kvstore.disk_tier.superblock import read_superblock

_MIB = 1024 * 1024
_CHUNK = 64 * 1024
#: See fallocate(2).
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
#: Share of the slots with a block whose room is taken away; the block is lost with it.
_LOST = 0.5
_libc = ctypes.CDLL(None, use_errno=True)


class MountRefused(Exception):
    """This process may not mount; the text has the reason."""


class SmallDisk:
    """A file system of a few MiB in memory, from `mount` to `unmount`."""

    def __init__(self, path: Path, n_mib: int) -> None:
        self.path = path
        self._n_mib = n_mib
        self._ballast = path / "ballast"

    def mount(self) -> None:
        """Mount the file system.

        Raises:
            MountRefused: this process may not.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._n_mib}m,mode=700", "halfmoon-chaos"]
        try:
            done = subprocess.run([*command, self.path], capture_output=True, text=True)
        except OSError as error:
            raise MountRefused(str(error)) from None
        if done.returncode:
            raise MountRefused(done.stderr.strip() or f"mount ended with {done.returncode}")

    def unmount(self) -> None:
        """Unmount it, at once or when its last user has ended."""
        subprocess.run(["umount", "--lazy", self.path], capture_output=True)

    def fill(self, dice: random.Random) -> int:
        """Leave no room for writes, and return how many slots lost theirs.

        No process may write meanwhile: it is stopped or has ended.
        """
        n_slots = sum(_take_room(path, dice) for path in sorted(self.path.glob("segment-*.kv")))
        self.fill_rest()
        return n_slots

    def fill_rest(self) -> None:
        """Fill what is free with ballast."""
        with suppress(OSError), self._ballast.open("ab", buffering=0) as ballast:
            while ballast.write(bytes(_CHUNK)) == _CHUNK:
                pass

    def free(self) -> None:
        """Remove the ballast."""
        self._ballast.unlink(missing_ok=True)

    def empty(self) -> None:
        """Remove the kvstore's files; it has ended."""
        for path in self.path.glob("segment-*.kv"):
            path.unlink()


def _take_room(path: Path, dice: random.Random) -> int:
    """Punch holes where slots are free, and where blocks are to be lost."""
    superblock = read_superblock(path)
    if superblock is None:
        return 0
    shape = superblock.shape
    used = {found.slot for found in scan_blocks(path)}
    slots = [slot for slot in range(shape.n_slots) if slot not in used or dice.random() < _LOST]
    with path.open("r+b") as file:
        for slot in slots:
            _punch(file.fileno(), shape.offset(slot), shape.slot_bytes)
    return len(slots)


def _punch(fd: int, offset: int, n_bytes: int) -> None:
    numbers = (ctypes.c_long(offset), ctypes.c_long(n_bytes))
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, *numbers):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
