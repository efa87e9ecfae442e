"""Report a kvstore's use and requests by tier, as metrics and as its load message."""

from halfmoon_protocol.messages import KvstoreLoad
from halfmoon_runtime.observability.metrics import LabelledValues, MetricSnapshot, by_label
from halfmoon_scheduling.tiers.tiered_cache import TieredCache


def kvstore_metrics(
    tiers: TieredCache, block_bytes: int, n_batches: int, missing_disk_bytes: int = 0
) -> MetricSnapshot:
    """Return the metrics; counts are since the start of the process.

    Args:
        tiers: memory and disk.
        block_bytes: size of one block.
        n_batches: number of published messages of KV events.
        missing_disk_bytes: bytes of the disk's files for which there has been no room yet.
    """
    memory, disk, counts = tiers.memory, tiers.disk, tiers.counts
    used = {"memory": memory.n_used, "disk": len(disk) + tiers.n_writing}
    capacity = {"memory": memory.n_slots, "disk": disk.n_slots}
    return {
        "halfmoon_kvstore_blocks": (
            "Blocks by tier and state: stored, reserved in memory by a put that is under way, on"
            " their way to the disk.",
            LabelledValues(
                ("tier", "state"),
                {
                    ("memory", "stored"): memory.n_stored,
                    ("memory", "reserved"): memory.n_reserved,
                    ("disk", "stored"): len(disk),
                    ("disk", "writing"): tiers.n_writing,
                },
            ),
        ),
        "halfmoon_kvstore_capacity_blocks": (
            "Blocks that fit, by tier.",
            by_label("tier", capacity),
        ),
        "halfmoon_kvstore_used_bytes": (
            "Bytes of blocks in any state, by tier.",
            by_label("tier", {tier: n * block_bytes for tier, n in used.items()}),
        ),
        "halfmoon_kvstore_capacity_bytes": (
            "Bytes of blocks that fit, by tier.",
            by_label("tier", {tier: n * block_bytes for tier, n in capacity.items()}),
        ),
        "halfmoon_kvstore_leased_blocks": (
            "Blocks in memory that are being read.",
            memory.n_leased,
        ),
        "halfmoon_kvstore_promoting_blocks": (
            "Blocks on their way back from the disk, or queued for it.",
            tiers.n_promoting,
        ),
        "halfmoon_kvstore_disk_off": (
            "1 while the disk is left alone because writes failed.",
            int(tiers.disk_is_off),
        ),
        "halfmoon_kvstore_disk_missing_bytes": (
            "Bytes of the disk's files for which the file system has had no room yet.",
            missing_disk_bytes,
        ),
        "halfmoon_kvstore_pinned_blocks": (
            "Blocks with a soft and with a hard pin; held: those and what is before the latter.",
            by_label(
                "kind",
                {"soft": tiers.pins.n_soft, "hard": tiers.pins.n_hard, "held": tiers.pins.n_held},
            ),
        ),
        "halfmoon_kvstore_tenant_blocks": (
            "Blocks of tenants that have a quota, in both tiers.",
            by_label("tenant", tiers.tenants.usage()),
        ),
        "halfmoon_kvstore_lookup_blocks_total": (
            "Blocks asked for, by the tier that had them; none: they were missing.",
            by_label(
                "tier",
                {
                    "memory": counts.hits_memory,
                    "disk": counts.hits_disk,
                    "none": counts.misses,
                },
            ),
        ),
        "halfmoon_kvstore_moved_blocks_total": (
            "Blocks that left memory (evicted), were written to the disk, were promoted from it,"
            " or are in neither any more (dropped).",
            by_label(
                "move",
                {
                    "evicted": counts.evicted,
                    "written": counts.written,
                    "promoted": counts.promoted,
                    "dropped": counts.dropped,
                },
            ),
        ),
        "halfmoon_kvstore_disk_write_failures_total": (
            "Blocks whose writing to the disk failed.",
            counts.write_failures,
        ),
        "halfmoon_kvstore_damaged_blocks_total": (
            "Blocks whose bytes were not what was stored.",
            counts.corrupt,
        ),
        "halfmoon_kvstore_event_batches_total": (
            "Messages of KV events that were published.",
            n_batches,
        ),
    }


def load_message(tiers: TieredCache, sequence: int) -> KvstoreLoad:
    """Build the load message for conductors.

    Args:
        tiers: memory and disk.
        sequence: number of the last published KV event.
    """
    memory, disk, counts = tiers.memory, tiers.disk, tiers.counts
    return KvstoreLoad(
        n_stored=memory.n_stored,
        n_reserved=memory.n_reserved,
        n_leased=memory.n_leased,
        n_blocks=memory.n_slots,
        sequence=sequence,
        n_disk_stored=len(disk),
        n_disk_blocks=disk.n_slots,
        n_found_in_memory=counts.hits_memory,
        n_found_on_disk=counts.hits_disk,
        n_missing=counts.misses,
    )
