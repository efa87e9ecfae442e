"""Whose blocks a kvstore holds, as far as tenants have quotas.

A tenant's blocks are its own, since its salt is in their hashes: a quota is over what it has in
the node, in either tier, and what it is writing. Over it, a put gives up the tenant's own blocks,
the one unused longest first, children before parents; what is leased or pinned stays.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_cache import CacheFull

#: The name that stands for all tenants without a quota of their own.
ANY_OTHER_TENANT = "*"

_Key = tuple[str, Ticket]


class OverQuota(CacheFull):
    """A tenant has all that it may, and none of it can go now; nothing changed."""


class TenantQuotas:
    """Owners of blocks; knows nothing of tiers."""

    def __init__(self, quotas: Mapping[str, int] | None = None) -> None:
        """`quotas`: blocks by tenant; `ANY_OTHER_TENANT` is for each tenant that is not named."""
        self._quotas = dict(quotas or {})
        #: Each tenant's stored blocks, the one unused longest first; only of those with a quota.
        self._own: dict[str, dict[BlockHash, None]] = {}
        self._owner: dict[BlockHash, str] = {}
        #: Blocks being written by tenants with a quota; of reservations that may be over.
        self._writing: dict[_Key, tuple[str, int]] = {}

    def quota(self, tenant: str) -> int | None:
        """Blocks that it may have; None: any number, as may who has no name."""
        return self._quotas.get(tenant, self._quotas.get(ANY_OTHER_TENANT)) if tenant else None

    def owner(self, block: BlockHash) -> str:
        """Whose a stored block is; empty: nobody's with a quota, as far as is known."""
        return self._owner.get(block, "")

    def usage(self) -> dict[str, int]:
        """Stored blocks of each tenant that has a quota and blocks."""
        return {tenant: len(own) for tenant, own in self._own.items()}

    def n_blocks(self, tenant: str) -> int:
        """Blocks that it has, and is writing."""
        writing = sum(n for name, n in self._writing.values() if name == tenant)
        return len(self._own.get(tenant, ())) + writing

    def excess(self, tenant: str, n_more: int) -> int:
        """Blocks over its quota if a tenant had so many more; negative: so many fit still."""
        quota = self.quota(tenant)
        assert quota is not None
        return self.n_blocks(tenant) + n_more - quota

    def refusal(self, tenant: str, retry_after_s: float) -> OverQuota:
        """What to say when nothing of it can go."""
        return OverQuota(
            f"tenant {tenant} has {self.n_blocks(tenant)} of the {self.quota(tenant)} blocks of "
            "its quota here, and all of them are being written or read, pinned, or this prompt's "
            f"prefix: retry in {retry_after_s:.1f} s, or raise its quota in tenant_quotas_mib",
            retry_after_s,
        )

    # -- what happens to blocks --------------------------------------------------------------

    def writes(self, key: _Key, tenant: str, n_blocks: int) -> None:
        """A tenant has reserved room for so many."""
        if self.quota(tenant) is not None:
            self._writing[key] = (tenant, n_blocks)

    def written(self, key: _Key, blocks: Sequence[BlockHash]) -> None:
        """They are stored now."""
        tenant, _ = self._writing.pop(key, ("", 0))
        self.own(tenant, blocks)

    def forget_writes(self, is_open: Callable[[_Key], bool]) -> None:
        """Forget reservations that are over."""
        for key in [key for key in self._writing if not is_open(key)]:
            del self._writing[key]

    def own(self, tenant: str, blocks: Sequence[BlockHash]) -> None:
        """Stored blocks are this tenant's: who can name them has its salt."""
        if self.quota(tenant) is not None:
            for block in blocks:
                if self._owner.setdefault(block, tenant) == tenant:
                    self._own.setdefault(tenant, {})[block] = None

    def touch(self, blocks: Sequence[BlockHash]) -> None:
        """These were used."""
        for block in reversed(blocks):
            if (tenant := self._owner.get(block)) is not None:
                own = self._own[tenant]
                del own[block]
                own[block] = None

    def gone(self, block: BlockHash) -> None:
        """A block is in no tier any more."""
        if (tenant := self._owner.pop(block, None)) is not None:
            own = self._own[tenant]
            del own[block]
            if not own:
                del self._own[tenant]

    # -- what a quota asks -------------------------------------------------------------------

    def give_up(
        self,
        tenant: str,
        n: int,
        keep: Collection[BlockHash | None],
        spared: Collection[BlockHash],
        place_in_prompt: Callable[[BlockHash], tuple[BlockHash | None, int]],
        discard: Callable[[BlockHash], bool],
    ) -> int:
        """Have up to `n` of a tenant's blocks discarded; how many were.

        Args:
            tenant: whose.
            n: so many at the most.
            keep: blocks that must stay.
            spared: blocks that go when no others can.
            place_in_prompt: the block before one, and how many are.
            discard: gives a block up unless it is in use or has children; whether it did.
        """
        passed: set[BlockHash] = set()
        n_gone = 0
        for left_alone in (spared, ()):
            for candidate in list(self._own.get(tenant, ())):
                block: BlockHash | None = candidate
                while block is not None and n_gone < n and block not in keep:
                    parent, _ = place_in_prompt(block)
                    if block in left_alone or not discard(block):
                        passed.add(block)
                        break
                    n_gone += 1
                    block = parent if parent in passed else None
        return n_gone

    def check(self, stored: Collection[BlockHash]) -> None:
        """Audit: owners of stored blocks only, told the same both ways."""
        both = {block: tenant for tenant, own in self._own.items() for block in own}
        assert both == self._owner
        assert all(block in stored for block in both), "a block that is gone has an owner"
