"""Map memory locations to near network cards: from sysfs, or from a given matrix.

A *matrix* names, for each memory location, the preferred cards and the secondary ones, in the
format that Mooncake's engine reads and prints:

    {"cpu:0": [["mlx5_0", "mlx5_1"], ["mlx5_2"]], "cuda:0": [["mlx5_0"], ["mlx5_1"]]}

The cards of the same NUMA node are near main memory. The cards of its node with the fewest PCI
hops are near a GPU. Memory of unknown location ("*") prefers no card: all are equal. The matrix
holds the RDMA cards of a machine, or the Ethernet cards if it has no RDMA.

Only `read_machine` reads files; all else is pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

ANYWHERE = "*"
_NVIDIA, _AMD = "0x10de", "0x1002"
#: Prefixes of the PCI classes of displays and accelerators.
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
#: PCI hops to a device of unknown path, or under another root.
_FAR_HOPS = 99


class Device(msgspec.Struct, frozen=True):
    """A card in this machine."""

    name: str
    kind: str
    #: None when the machine does not say, as with one node, or a virtual card.
    numa_node: int | None = None
    #: The PCI functions from the root to the card; () for a virtual one.
    pci: tuple[str, ...] = ()
    #: Megabits per second; None when unknown or without link.
    speed_mbps: int | None = None
    up: bool = True
    #: The Ethernet interface of an RDMA device, and the other way round.
    partner: str = ""


class MachineHardware(msgspec.Struct, frozen=True):
    """The network cards, GPUs and NUMA nodes of a machine."""

    #: "rdma" and "ethernet".
    nics: tuple[Device, ...] = ()
    #: "cuda" (or "hip"), in the order of their PCI addresses, as drivers number them.
    gpus: tuple[Device, ...] = ()
    numa_nodes: tuple[int, ...] = (0,)


class Topology(msgspec.Struct, frozen=True):
    """Preferred and secondary cards, by memory location."""

    matrix: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]

    def tier(self, location: str, nic: str) -> int:
        """Return 0 for a preferred card, 1 for a secondary one, 2 for others.

        This is the index into `spray.PENALTIES`. A location that is not in the matrix counts as
        "*"; without "*" all cards are equal.
        """
        tiers = self.matrix.get(location) or self.matrix.get(ANYWHERE)
        if tiers is None:
            return 0
        return next((index for index, names in enumerate(tiers) if nic in names), 2)

    def candidates(self, location: str) -> tuple[str, ...]:
        """Return all cards for this location, preferred ones first."""
        tiers = self.matrix.get(location) or self.matrix.get(ANYWHERE) or ((), ())
        return tiers[0] + tiers[1]


def topology_of(machine: MachineHardware) -> Topology:
    """Derive the matrix from a machine's hardware."""
    rdma = [nic for nic in machine.nics if nic.kind == "rdma"]
    nics = [nic for nic in rdma or machine.nics if nic.up]
    matrix: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for node in machine.numa_nodes:
        matrix[f"cpu:{node}"] = _split(nics, [nic for nic in nics if nic.numa_node == node])
    for index, gpu in enumerate(machine.gpus):
        same = [nic for nic in nics if nic.numa_node == gpu.numa_node] or nics
        hops = {nic.name: pci_hops(gpu.pci, nic.pci) for nic in same}
        least = min(hops.values(), default=0)
        near = [nic for nic in same if hops[nic.name] == least and least < _FAR_HOPS]
        matrix[f"{gpu.kind}:{index}"] = _split(nics, near or same)
    matrix[ANYWHERE] = (tuple(nic.name for nic in nics), ())
    return Topology(matrix)


def _split(
    nics: Sequence[Device], preferred: Sequence[Device]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names in two tiers; all cards are preferred if none is."""
    near = [nic.name for nic in preferred] or [nic.name for nic in nics]
    return tuple(near), tuple(nic.name for nic in nics if nic.name not in near)


def pci_hops(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the steps between two functions in the PCI tree; large when no path is known."""
    if not one or not other or one[0] != other[0]:
        return _FAR_HOPS
    shared = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        shared += 1
    return len(one) + len(other) - 2 * shared


# The matrix as JSON.


def encode_matrix(topology: Topology) -> bytes:
    """Encode a matrix in the format of Mooncake's engine."""
    return msgspec.json.encode(topology.matrix)


def decode_matrix(text: bytes) -> Topology:
    """Decode a matrix that an operator wrote.

    Raises:
        ValueError: it is not a matrix; the message says where.
    """
    try:
        matrix = msgspec.json.decode(text, type=dict[str, list[list[str]]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a NIC priority matrix: {error}") from None
    for location, tiers in matrix.items():
        if not 1 <= len(tiers) <= 2:
            raise ValueError(
                f"not a NIC priority matrix: {location!r} has {len(tiers)} lists of cards; "
                "there are one of preferred ones and one of secondary ones"
            )
    return Topology(
        {
            location: (tuple(tiers[0]), tuple(tiers[1]) if len(tiers) > 1 else ())
            for location, tiers in matrix.items()
        }
    )


def unknown_nics(topology: Topology, machine: MachineHardware) -> list[str]:
    """Return the cards that a matrix names and the machine does not have."""
    known = {nic.name for nic in machine.nics}
    named: Iterable[str] = (
        name for tiers in topology.matrix.values() for tier in tiers for name in tier
    )
    return sorted(set(named) - known)


# The machine.


def read_machine(sys_path: Path = Path("/sys")) -> MachineHardware:
    """Read sysfs. Unreadable entries are left out or unknown; nothing is raised."""
    ethernet = [_ethernet(path) for path in _children(sys_path / "class/net")]
    rdma = [_rdma(path) for path in _children(sys_path / "class/infiniband")]
    return MachineHardware(
        nics=tuple(_partners(rdma, [nic for nic in ethernet if nic is not None])),
        gpus=tuple(_gpus(sys_path / "bus/pci/devices")),
        numa_nodes=tuple(
            sorted(
                int(path.name[4:])
                for path in _children(sys_path / "devices/system/node")
                if path.name.startswith("node") and path.name[4:].isdecimal()
            )
        )
        or (0,),
    )


def _ethernet(path: Path) -> Device | None:
    """Read a network interface; None for loopback, which reaches no peer."""
    if _read(path / "type") not in ("1", "32"):
        return None
    return Device(
        name=path.name,
        kind="ethernet",
        numa_node=_node(path / "device"),
        pci=_pci(path / "device"),
        speed_mbps=_positive(_read(path / "speed")),
        up=_read(path / "operstate") not in ("down", "notpresent", "lowerlayerdown"),
    )


def _rdma(path: Path) -> Device:
    ports = _children(path / "ports")
    rates = [_read(port / "rate").partition(" ")[0] for port in ports]
    gigabits = [float(rate) for rate in rates if rate.replace(".", "", 1).isdecimal()]
    interfaces = _children(path / "device/net")
    partner = interfaces[0].name if interfaces else _read(path / "parent")
    return Device(
        name=path.name,
        kind="rdma",
        numa_node=_node(path / "device"),
        pci=_pci(path / "device"),
        speed_mbps=int(max(gigabits) * 1000) if gigabits else None,
        up=any("ACTIVE" in _read(port / "state") for port in ports),
        partner=partner,
    )


def _partners(rdma: Sequence[Device], ethernet: Sequence[Device]) -> list[Device]:
    """Return all cards; a software RDMA device gets the location of its interface."""
    under: Mapping[str, Device] = {nic.name: nic for nic in ethernet}
    found: list[Device] = []
    over: dict[str, str] = {}
    for nic in rdma:
        below = under.get(nic.partner)
        if below is not None:
            over[below.name] = nic.name
            if not nic.pci:
                nic = msgspec.structs.replace(nic, pci=below.pci, numa_node=below.numa_node)
        found.append(nic)
    return found + [
        msgspec.structs.replace(nic, partner=over.get(nic.name, "")) for nic in ethernet
    ]


def _gpus(devices: Path) -> list[Device]:
    found = []
    for path in _children(devices):
        vendor = _read(path / "vendor")
        if vendor in (_NVIDIA, _AMD) and _read(path / "class").startswith(_GPU_CLASSES):
            kind = "cuda" if vendor == _NVIDIA else "hip"
            found.append(Device(path.name, kind, _node(path), _pci(path)))
    return found


def _node(device: Path) -> int | None:
    text = _read(device / "numa_node")
    return int(text) if text.isdecimal() else None


def _pci(device: Path) -> tuple[str, ...]:
    """Return the PCI root and the functions down to this device, by their folder names."""
    try:
        parts = device.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return ()
    root = next((i for i, part in enumerate(parts) if part.startswith("pci")), None)
    if root is None:
        return ()
    # "0000:3b:00.0"; virtio devices and the like are below such a function.
    functions = [part for part in parts[root + 1 :] if part.count(":") == 2 and "." in part]
    return (parts[root], *functions)


def _positive(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
