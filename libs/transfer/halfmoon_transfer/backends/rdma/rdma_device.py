"""Open the RDMA devices that an engine uses, and choose an address of each.

A device has a table of GIDs, one for each address of its network interface and each protocol. An
IPv4-mapped GID of RoCE v2 is preferred (routable, and the best tested), then any GID of RoCE v2,
then the first one. The table may change while links go down and come up, so it is read again for
each connection.
"""

import ipaddress
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

from halfmoon_transfer.backends.rdma import verbs
from halfmoon_transfer.backends.rdma.verbs import VerbsContext, VerbsError
from halfmoon_transfer.interface import BackendUnavailable

_SYSFS = Path("/sys/class/infiniband")
#: Empty entries in a row that end a table.
_MAX_GAP = 8


class Gid(msgspec.Struct, frozen=True):
    """One entry of a device's table."""

    index: int
    #: 8 groups of 4 hex digits.
    text: str
    #: "RoCE v2", "IB/RoCE v1"; empty if the kernel doesn't tell.
    kind: str


def choose_gid(entries: Sequence[Gid]) -> Gid | None:
    """Choose the GID to advertise; None if there is none."""

    def rank(gid: Gid) -> tuple[bool, bool, bool]:
        address = ipaddress.IPv6Address(gid.text)
        return gid.kind != "RoCE v2", address.ipv4_mapped is None, address.is_link_local

    return min(entries, key=rank, default=None)


def read_gids(device: str, root: Path = _SYSFS) -> list[Gid]:
    """Read a device's table from the kernel, without empty and vanishing entries."""
    port = root / device / "ports" / str(verbs.PORT)
    found: list[Gid] = []
    n_empty = 0
    # Tables are long and mostly empty, and each entry is a file.
    for index in count():
        try:
            text = (port / "gids" / str(index)).read_text().strip()
        except OSError:
            break
        n_empty = n_empty + 1 if not text.strip("0:") else 0
        if n_empty > _MAX_GAP:
            break
        if n_empty == 0:
            found.append(Gid(index, text, _kind(port / "gid_attrs" / "types" / str(index))))
    return found


def _kind(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""  # an older kernel, or the entry is just being removed


class RdmaDevice:
    """One opened device."""

    def __init__(self, name: str) -> None:
        """Open the device.

        Raises:
            VerbsError: it can't be opened.
        """
        self.name = name
        self.context = VerbsContext(name)
        # Even an empty write needs registered memory: this page.
        self._page = np.zeros(4096, np.uint8)
        address = int(self._page.ctypes.data)
        self._registered = self.context.register(
            address, len(self._page), writable=False, remote=False
        )
        self.nothing = (address, 0, self._registered.lkey)
        self.max_message_bytes = self.context.port().max_message_bytes

    def gid(self) -> Gid:
        """Return the GID to advertise now.

        Raises:
            VerbsError: it has no address.
        """
        chosen = choose_gid(read_gids(self.name))
        if chosen is None:
            raise VerbsError(
                f"RDMA device {self.name} has no GID: its network interface needs an address"
            )
        return chosen

    def close(self) -> None:
        """Close the device; its queue pairs and registrations are closed already."""
        self._registered.close()
        self.context.close()


def open_devices(wanted: Sequence[str]) -> dict[str, RdmaDevice]:
    """Open these devices, or all that have an address if none is named.

    Raises:
        BackendUnavailable: no pyverbs, no devices, or not these.
    """
    present = verbs.device_names()
    missing = [name for name in wanted if name not in present]
    if missing:
        raise BackendUnavailable(
            f"backend rdma: no device {', '.join(missing)}; there are: {', '.join(present) or '-'}"
        )
    names = list(wanted) or [name for name in present if choose_gid(read_gids(name))]
    if not names:
        raise BackendUnavailable(
            f"backend rdma: no RDMA device has an address; devices: {', '.join(present) or 'none'}"
        )
    opened: dict[str, RdmaDevice] = {}
    try:
        for name in names:
            opened[name] = RdmaDevice(name)
    except VerbsError as error:
        for device in opened.values():
            device.close()
        raise BackendUnavailable(f"backend rdma: {error}") from error
    return opened
