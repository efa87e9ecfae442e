"""Fit a tenant's put into its quota: discard its own older blocks, or shorten the put."""

from collections.abc import Sequence

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.tiers.tier_store import TierStore


def fit_into_quota(
    store: TierStore,
    tenant: str,
    hashes: Sequence[BlockHash],
    parent: BlockHash | None,
    now: float,
) -> Sequence[BlockHash]:
    """Discard a tenant's other blocks for these, and return as many of these as its quota allows.

    Args:
        store: the blocks of all tenants.
        tenant: a tenant with a quota.
        hashes: the blocks to put, in the order of their prompt.
        parent: the block before them.
        now: seconds.

    Raises:
        OverQuota: not one block fits, because all of the tenant's blocks are in use.
    """
    memory, tenants = store.memory, store.tenants
    memory.expire(now)
    tenants.forget_writes(memory.has_reservation)
    tenants.own(tenant, [block for block in hashes if block in store])
    missing = [b for b in hashes if not (b in store or memory.is_reserved(b))]
    n_over = tenants.excess(tenant, len(missing))
    # Copies may put a tenant over its quota; a put that needs no room is success all the same.
    if n_over <= 0 or not missing:
        return hashes
    keep = {*hashes, parent}
    n_over -= tenants.discard_own(
        tenant, n_over, keep, store.pins.soft, store.parent_and_depth, store.discard
    )
    if n_over >= len(missing):
        raise tenants.refusal(tenant, memory.first_release_s(now))
    return hashes[: hashes.index(missing[-n_over])] if n_over else hashes
