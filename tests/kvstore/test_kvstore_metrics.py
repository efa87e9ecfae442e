"""What a kvstore's metrics and its load message show, from tiers that do all at once."""

from halfmoon_kvstore.metrics import kvstore_metrics, load_message
from halfmoon_protocol.ids import Ticket
from halfmoon_runtime.observability.metrics import LabelledValues
from halfmoon_testing.block_client import InstantTiers, prompt_blocks


def by_label(tiers: InstantTiers, name: str) -> dict[str, float]:
    found = kvstore_metrics(tiers.tiers, 10, 3)[f"halfmoon_kvstore_{name}"][1]
    assert isinstance(found, LabelledValues)
    return {" ".join(labels): value for labels, value in found.values.items()}  # type: ignore[misc]


def test_blocks_bytes_and_lookups_are_told_by_tier() -> None:
    node = InstantTiers(n_memory=8, n_disk=64)
    node.get(prompt_blocks(1, 3))
    node.put(prompt_blocks(1, 3))
    node.get(prompt_blocks(1, 4))
    node.tiers.reserve("client", Ticket("under way"), prompt_blocks(2, 2), None, 0.0)
    assert by_label(node, "blocks") == {
        "memory stored": 3,
        "memory reserved": 2,
        "disk stored": 0,
        "disk writing": 0,
    }
    assert by_label(node, "used_bytes") == {"memory": 50, "disk": 0}
    assert by_label(node, "capacity_bytes") == {"memory": 80, "disk": 640}
    assert by_label(node, "lookup_blocks_total") == {"memory": 3, "disk": 0, "none": 4}
    told = load_message(node.tiers, 5)
    assert (told.n_stored, told.n_reserved, told.n_blocks, told.sequence) == (3, 2, 8, 5)
    assert (told.n_found_in_memory, told.n_found_on_disk, told.n_missing) == (3, 0, 4)


def test_blocks_that_went_to_the_disk_and_back_are_told() -> None:
    node = InstantTiers(n_memory=8, n_disk=64)
    prompts = [prompt_blocks(i, 4) for i in range(6)]
    for each in prompts:
        node.put(each)
    node.get(prompts[0])
    n_on_disk = by_label(node, "blocks")["disk stored"]
    moved = by_label(node, "moved_blocks_total")
    assert n_on_disk >= 4 * 6 - 8
    assert moved == {"evicted": moved["evicted"], "written": n_on_disk, "promoted": 4, "dropped": 0}
    assert 4 * 6 + 4 - moved["evicted"] == by_label(node, "blocks")["memory stored"]
    assert by_label(node, "lookup_blocks_total")["disk"] == 4
    assert by_label(node, "used_bytes")["disk"] == 10 * n_on_disk
    told = load_message(node.tiers, 5)
    assert (told.n_disk_stored, told.n_disk_blocks, told.n_found_on_disk) == (n_on_disk, 64, 4)
