"""Print this machine's network cards and GPUs, for `halfmoon transfer topology`."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from halfmoon_transfer.planning.topology import (
    Device,
    MachineHardware,
    Topology,
    decode_matrix,
    encode_matrix,
    read_machine,
    topology_of,
    unknown_nics,
)


def show_topology(
    console: Console, *, as_json: bool, matrix: Path | None, sys_path: Path = Path("/sys")
) -> None:
    """Print the topology as a table or as JSON.

    Args:
        console: where to.
        as_json: only the matrix, in the format that is read again.
        matrix: a file with a matrix that takes the place of what was found out.
        sys_path: where sysfs is.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not a matrix.
    """
    machine = read_machine(sys_path)
    topology = topology_of(machine) if matrix is None else decode_matrix(matrix.read_bytes())
    if as_json:
        console.out(encode_matrix(topology).decode(), highlight=False)
        return
    console.print(_cards(machine))
    console.print(_matrix(topology))
    if not any(nic.kind == "rdma" for nic in machine.nics):
        console.print("no RDMA devices: the matrix is of Ethernet cards")
    for name in unknown_nics(topology, machine):
        console.print(f"[yellow]{name} is in the matrix, and this machine has no such card")


def _cards(machine: MachineHardware) -> Table:
    table = Table(box=None, pad_edge=False, title="cards", title_justify="left")
    for column in ("name", "kind", "NUMA node", "PCI", "Mbit/s", "state", "with"):
        table.add_column(column)
    for card in (*machine.nics, *machine.gpus):
        table.add_row(
            card.name,
            card.kind,
            _known(card.numa_node),
            _place(card),
            _known(card.speed_mbps),
            "up" if card.up else "down",
            card.partner or "–",
        )
    return table


def _matrix(topology: Topology) -> Table:
    table = Table(box=None, pad_edge=False, title="\nmemory", title_justify="left")
    for column in ("location", "preferred", "secondary"):
        table.add_column(column)
    for location, tiers in topology.matrix.items():
        table.add_row(location, *(" ".join(names) or "–" for names in tiers))
    return table


def _place(card: Device) -> str:
    return card.pci[-1] if card.pci else "virtual"


def _known(value: int | None) -> str:
    return "–" if value is None else str(value)
