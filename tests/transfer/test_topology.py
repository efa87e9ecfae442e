"""Which cards are near which memory, on machines made of folders."""

from pathlib import Path

import pytest

from halfmoon_transfer.planning.topology import (
    Device,
    MachineHardware,
    decode_matrix,
    encode_matrix,
    read_machine,
    topology_of,
    unknown_nics,
)


class Sysfs:
    """A fake /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str | int) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(self.root / target)

    def node(self, number: int) -> None:
        self.write(f"devices/system/node/node{number}/cpulist", "0-7")

    def pci(self, path: str, numa_node: int, *, vendor: str = "0x15b3", kind: str = "") -> str:
        where = f"devices/{path}"
        self.write(f"{where}/numa_node", numa_node)
        self.write(f"{where}/vendor", vendor)
        self.write(f"{where}/class", kind or "0x020000")
        self.link(f"bus/pci/devices/{path.rsplit('/', 1)[1]}", where)
        return where

    def ethernet(
        self, name: str, device: str = "", *, speed: int | str = -1, state: str = "up"
    ) -> None:
        where = f"class/net/{name}"
        self.write(f"{where}/type", 772 if name == "lo" else 1)
        self.write(f"{where}/operstate", state)
        self.write(f"{where}/speed", speed)
        if device:
            self.link(f"{where}/device", device)

    def rdma(self, name: str, device: str, interface: str, *, state: str = "4: ACTIVE") -> None:
        where = f"class/infiniband/{name}"
        self.write(f"{where}/ports/1/state", state)
        self.write(f"{where}/ports/1/rate", "200 Gb/sec (4X HDR)")
        if device:
            self.link(f"{where}/device", device)
            self.write(f"{device}/net/{interface}/dummy", "")
        else:
            self.write(f"{where}/parent", interface)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def two_sockets(sysfs: Sysfs) -> None:
    """Two nodes; on each one switch with a GPU and a card, and another card beside it."""
    for node, root in enumerate(("pci0000:00", "pci0000:80")):
        sysfs.node(node)
        bus = "00" if node == 0 else "80"
        switch = f"{root}/0000:{bus}:01.0"
        gpu = f"{switch}/0000:{bus}:02.0"
        sysfs.pci(gpu, node, vendor="0x10de", kind="0x030200")
        near = sysfs.pci(f"{switch}/0000:{bus}:03.0", node)
        far = sysfs.pci(f"{root}/0000:{bus}:07.0", node)
        sysfs.ethernet(f"eth{2 * node}", near, speed=200_000)
        sysfs.ethernet(f"eth{2 * node + 1}", far, speed=200_000)
        sysfs.rdma(f"mlx5_{2 * node}", near, f"eth{2 * node}")
        sysfs.rdma(f"mlx5_{2 * node + 1}", far, f"eth{2 * node + 1}")
    sysfs.ethernet("lo")


def test_cards_of_the_same_node_are_preferred_and_for_a_gpu_the_nearest(sysfs: Sysfs) -> None:
    two_sockets(sysfs)
    machine = read_machine(sysfs.root)
    assert topology_of(machine).matrix == {
        "cpu:0": (("mlx5_0", "mlx5_1"), ("mlx5_2", "mlx5_3")),
        "cpu:1": (("mlx5_2", "mlx5_3"), ("mlx5_0", "mlx5_1")),
        "cuda:0": (("mlx5_0",), ("mlx5_1", "mlx5_2", "mlx5_3")),
        "cuda:1": (("mlx5_2",), ("mlx5_0", "mlx5_1", "mlx5_3")),
        "*": (("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"), ()),
    }


def test_a_card_is_described_as_the_machine_does(sysfs: Sysfs) -> None:
    two_sockets(sysfs)
    found = {card.name: card for card in read_machine(sysfs.root).nics}
    assert set(found) == {f"{kind}{i}" for kind in ("eth", "mlx5_") for i in range(4)}
    pci = ("pci0000:80", "0000:80:01.0", "0000:80:03.0")
    assert found["mlx5_2"] == Device("mlx5_2", "rdma", 1, pci, 200_000, True, "eth2")
    assert found["eth2"] == Device("eth2", "ethernet", 1, pci, 200_000, True, "mlx5_2")


def test_a_card_that_is_down_is_seen_and_not_chosen(sysfs: Sysfs) -> None:
    two_sockets(sysfs)
    sysfs.write("class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    machine = read_machine(sysfs.root)
    assert not next(nic for nic in machine.nics if nic.name == "mlx5_0").up
    topology = topology_of(machine)
    assert topology.matrix["cuda:0"][0] == ("mlx5_1",)
    assert "mlx5_0" not in topology.candidates("cpu:0")


def test_without_rdma_the_ethernet_cards_are_it(sysfs: Sysfs) -> None:
    sysfs.node(0)
    sysfs.ethernet("lo")
    device = sysfs.pci("pci0000:00/0000:00:03.0", -1)
    sysfs.ethernet("ens3", f"{device}")
    sysfs.ethernet("docker0", state="down")
    machine = read_machine(sysfs.root)
    assert [(nic.name, nic.numa_node, nic.speed_mbps, nic.up) for nic in machine.nics] == [
        ("docker0", None, None, False),
        ("ens3", None, None, True),
    ]
    assert topology_of(machine).matrix == {"cpu:0": (("ens3",), ()), "*": (("ens3",), ())}


def test_a_software_rdma_device_stands_where_its_interface_does(sysfs: Sysfs) -> None:
    sysfs.node(0)
    sysfs.node(1)
    sysfs.ethernet("eth0", sysfs.pci("pci0000:00/0000:00:03.0", 1), speed=1000)
    sysfs.rdma("rxe0", "", "eth0")
    machine = read_machine(sysfs.root)
    assert machine.nics[0].numa_node == 1
    assert topology_of(machine).matrix["cpu:1"] == (("rxe0",), ())


def test_a_machine_that_says_nothing_has_one_node_and_no_cards(tmp_path: Path) -> None:
    assert read_machine(tmp_path / "nothing") == MachineHardware()
    assert topology_of(MachineHardware()).matrix == {"cpu:0": ((), ()), "*": ((), ())}


def test_unreadable_files_are_unknown_values(sysfs: Sysfs) -> None:
    sysfs.ethernet("eth0", speed="what?", state="")
    (sysfs.root / "class/net/eth0/operstate").write_bytes(b"\xff\xfe")
    (sysfs.root / "class/net/bonding_masters").write_text("")
    (nic,) = read_machine(sysfs.root).nics
    assert (nic.name, nic.speed_mbps, nic.pci) == ("eth0", None, ())


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.numa_nodes
    assert set(topology_of(machine).matrix) >= {"*"}


def test_the_reference_s_format_is_read_and_written() -> None:
    text = b'{"cpu:0":[["mlx5_0","mlx5_1"],["mlx5_2"]],"cuda:0":[["mlx5_0"],[]]}'
    topology = decode_matrix(text)
    assert encode_matrix(topology) == text
    assert decode_matrix(b'{"cpu:0":[["a"]]}').matrix == {"cpu:0": (("a",), ())}
    assert topology.candidates("cpu:0") == ("mlx5_0", "mlx5_1", "mlx5_2")
    assert [topology.tier("cpu:0", f"mlx5_{i}") for i in (0, 2, 3)] == [0, 1, 2]
    assert topology.tier("cpu:9", "mlx5_0") == 0, "of an unknown place nothing is far"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[]", "not a NIC priority matrix"),
        (b'{"cpu:0": ["mlx5_0"]}', "not a NIC priority matrix"),
        (b'{"cpu:0": [[], [], []]}', "'cpu:0' has 3 lists"),
        (b'{"cpu:0": []}', "'cpu:0' has 0 lists"),
        (b"\xff", "not a NIC priority matrix"),
    ],
)
def test_what_is_no_matrix_is_refused_and_says_where(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode_matrix(text)


def test_cards_that_are_not_there_are_named() -> None:
    machine = MachineHardware(nics=(Device("eth0", "ethernet"),))
    topology = decode_matrix(b'{"*": [["eth0", "mlx5_9"], ["mlx5_8"]]}')
    assert unknown_nics(topology, machine) == ["mlx5_8", "mlx5_9"]
