"""Count and limit the blocks of each tenant in a kvstore.

A tenant's blocks are its own, since its salt is in their hashes. A quota limits the blocks that it
has in either tier of the node and those that it is writing. A put over the quota discards the
tenant's own blocks, the least recently used first and children before parents. Leased and pinned
blocks stay.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_cache import CacheFull

#: The name that stands for all tenants without a quota of their own.
ANY_OTHER_TENANT = "*"

_Key = tuple[str, Ticket]


class OverQuota(CacheFull):
    """A tenant is at its quota, and none of its blocks can be discarded now; nothing changed."""

    code = error_codes.OVER_LIMIT


class TenantQuotas:
    """Quotas of tenants, and the owners of blocks; independent of tiers."""

    def __init__(self, quotas: Mapping[str, int] | None = None) -> None:
        """Start without blocks.

        Args:
            quotas: blocks by tenant; `ANY_OTHER_TENANT` is for each tenant that is not named.
        """
        self._quotas = dict(quotas or {})
        #: Stored blocks of each tenant with a quota, the least recently used first.
        self._own: dict[str, dict[BlockHash, None]] = {}
        self._owner: dict[BlockHash, str] = {}
        #: Tenant and blocks of each reservation under a quota; some may have ended.
        self._writing: dict[_Key, tuple[str, int]] = {}

    def quota(self, tenant: str) -> int | None:
        """Return the blocks that a tenant may have; None: any number, also without a tenant."""
        return self._quotas.get(tenant, self._quotas.get(ANY_OTHER_TENANT)) if tenant else None

    def owner(self, block: BlockHash) -> str:
        """Return the tenant that is known to own a stored block; empty without one."""
        return self._owner.get(block, "")

    def usage(self) -> dict[str, int]:
        """Return the number of stored blocks of each tenant that has a quota and blocks."""
        return {tenant: len(own) for tenant, own in self._own.items()}

    def n_blocks(self, tenant: str) -> int:
        """Return the number of blocks that a tenant has or is writing."""
        writing = sum(n for name, n in self._writing.values() if name == tenant)
        return len(self._own.get(tenant, ())) + writing

    def excess(self, tenant: str, n_more: int) -> int:
        """Return how far `n_more` blocks would exceed a quota; negative: blocks that still fit."""
        quota = self.quota(tenant)
        assert quota is not None
        return self.n_blocks(tenant) + n_more - quota

    def refusal(self, tenant: str, retry_after_s: float) -> OverQuota:
        """Return the error for a tenant of which no block can be discarded."""
        return OverQuota(
            f"tenant {tenant} has {self.n_blocks(tenant)} of the {self.quota(tenant)} blocks of "
            "its quota here, and all of them are being written or read, pinned, or this prompt's "
            f"prefix: retry in {retry_after_s:.1f} s, or raise its quota in tenant_quotas_mib",
            retry_after_s,
        )

    # -- blocks that come and go -------------------------------------------------------------

    def writes(self, key: _Key, tenant: str, n_blocks: int) -> None:
        """Record that a tenant has reserved slots for so many blocks."""
        if self.quota(tenant) is not None:
            self._writing[key] = (tenant, n_blocks)

    def written(self, key: _Key, blocks: Sequence[BlockHash]) -> None:
        """Record that the blocks of a reservation are stored."""
        tenant, _ = self._writing.pop(key, ("", 0))
        self.own(tenant, blocks)

    def forget_writes(self, is_open: Callable[[_Key], bool]) -> None:
        """Forget reservations that have ended."""
        for key in [key for key in self._writing if not is_open(key)]:
            del self._writing[key]

    def own(self, tenant: str, blocks: Sequence[BlockHash]) -> None:
        """Record a tenant as the owner of stored blocks: only it has the salt to name them."""
        if self.quota(tenant) is not None:
            for block in blocks:
                if self._owner.setdefault(block, tenant) == tenant:
                    self._own.setdefault(tenant, {})[block] = None

    def touch(self, blocks: Sequence[BlockHash]) -> None:
        """Record a use of blocks."""
        if not self._owner:
            return
        for block in reversed(blocks):
            if (tenant := self._owner.get(block)) is not None:
                own = self._own[tenant]
                del own[block]
                own[block] = None

    def on_removed(self, block: BlockHash) -> None:
        """Forget a block that no tier holds any more."""
        if (tenant := self._owner.pop(block, None)) is not None:
            own = self._own[tenant]
            del own[block]
            if not own:
                del self._own[tenant]

    # -- making room in a quota --------------------------------------------------------------

    def discard_own(
        self,
        tenant: str,
        n: int,
        keep: Collection[BlockHash | None],
        spared: Collection[BlockHash],
        parent_and_depth: Callable[[BlockHash], tuple[BlockHash | None, int]],
        discard: Callable[[BlockHash], bool],
    ) -> int:
        """Discard up to `n` of a tenant's blocks, and return how many were discarded.

        Args:
            tenant: the tenant.
            n: blocks to discard at the most.
            keep: blocks that must stay.
            spared: blocks to discard only when no others can be.
            parent_and_depth: returns a block's parent, and its depth in the prompt.
            discard: discards a block unless it is in use or has children; returns whether it did.
        """
        passed: set[BlockHash] = set()
        n_gone = 0
        for left_alone in (spared, ()):
            for candidate in list(self._own.get(tenant, ())):
                block: BlockHash | None = candidate
                while block is not None and n_gone < n and block not in keep:
                    parent, _ = parent_and_depth(block)
                    if block in left_alone or not discard(block):
                        passed.add(block)
                        break
                    n_gone += 1
                    block = parent if parent in passed else None
        return n_gone

    def check(self, stored: Collection[BlockHash]) -> None:
        """Check that only stored blocks have owners, and that both indices agree."""
        both = {block: tenant for tenant, own in self._own.items() for block in own}
        assert both == self._owner
        assert all(block in stored for block in both), "a removed block has an owner"
