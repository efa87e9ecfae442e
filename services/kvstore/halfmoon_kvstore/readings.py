"""How full a kvstore is and what it was asked for, by tier: its metrics, and its load message."""

from halfmoon_protocol.messages import KvstoreLoad
from halfmoon_runtime.gauges import Readings
from halfmoon_scheduling.tiers import TieredCache


def readings(tiers: TieredCache) -> Readings:
    """What the metrics show; counts are since the start of the process."""
    memory, disk, counts = tiers.memory, tiers.disk, tiers.counts
    return {
        "halfmoon_kvstore_blocks": (
            "Blocks in memory by state; leased ones are stored too.",
            {"stored": memory.n_stored, "reserved": memory.n_reserved, "leased": memory.n_leased},
        ),
        "halfmoon_kvstore_capacity_blocks": ("Blocks that fit into memory.", memory.n_slots),
        "halfmoon_kvstore_disk_blocks": (
            "Blocks on the disk, on their way there, and on their way back or queued for it.",
            {"stored": len(disk), "writing": tiers.n_writing, "promoting": tiers.n_promoting},
        ),
        "halfmoon_kvstore_disk_capacity_blocks": ("Blocks that fit on the disk.", disk.n_slots),
        "halfmoon_kvstore_disk_off": (
            "1 while the disk is left alone because writes failed.",
            int(tiers.disk_is_off),
        ),
        "halfmoon_kvstore_pinned_blocks": (
            "Blocks with a soft and with a hard pin; held: those and what is before the latter.",
            {"soft": tiers.pins.n_soft, "hard": tiers.pins.n_hard, "held": tiers.pins.n_held},
        ),
        "halfmoon_kvstore_tenant_blocks": (
            "Blocks of tenants that have a quota, in both tiers.",
            tiers.tenants.usage(),
        ),
        "halfmoon_kvstore_lookups": (
            "Blocks asked for, by the tier that had them.",
            {
                "memory": counts.hits_memory,
                "disk": counts.hits_disk,
                "missing": counts.misses,
            },
        ),
        "halfmoon_kvstore_moves": (
            "Blocks written to the disk and promoted from it, writes that failed, blocks whose"
            " bytes were damaged, and blocks dropped from both tiers.",
            {
                "written": counts.written,
                "promoted": counts.promoted,
                "write_failed": counts.write_failures,
                "damaged": counts.corrupt,
                "dropped": counts.dropped,
            },
        ),
    }


def load(tiers: TieredCache, sequence: int) -> KvstoreLoad:
    """What conductors are told.

    Args:
        tiers: memory and disk.
        sequence: number of the newest KV event that was published.
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
