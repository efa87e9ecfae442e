"""Quotas of tenants over both tiers of a kvstore."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_cache import BlockCache
from halfmoon_scheduling.cache.pins import Pins
from halfmoon_scheduling.cache.tenant_quotas import OverQuota, TenantQuotas
from halfmoon_scheduling.tiers.disk_map import DiskMap
from halfmoon_scheduling.tiers.tier_commands import Erase, Promote, WriteBack
from halfmoon_scheduling.tiers.tiered_cache import TieredCache
from tests.scheduling.cache.chains import chain


class Store:
    """Two tiers whose I/O is done at once."""

    def __init__(self, n_memory: int, n_disk: int, **quotas: int) -> None:
        named = {name.replace("others", "*"): n for name, n in quotas.items()}
        self.tiers = TieredCache(
            BlockCache(n_memory, lease_ttl_s=5, reservation_ttl_s=5, pins=Pins(n_memory)),
            DiskMap(n_disk),
            tenants=TenantQuotas(named),
        )
        self.now = 0.0
        self.n = 0

    def ticket(self) -> Ticket:
        self.n += 1
        return Ticket(str(self.n))

    def put(self, tenant: str, prompt: str, *, copy: bool = False) -> list[BlockHash]:
        """Store a prompt; the blocks that got room."""
        ticket = self.ticket()
        try:
            reserved = self.tiers.reserve(
                tenant, ticket, chain(prompt), None, self.now,
                tenant=tenant, within_quota=not copy,
            )  # fmt: skip
        finally:
            self.carry()
        self.tiers.commit(tenant, ticket, [0] * len(reserved.places), self.now)
        self.carry()
        self.tiers.check()
        return [block for block, _ in reserved.places]

    def carry(self) -> None:
        while commands := self.tiers.commands():
            for command in commands:
                match command:
                    case WriteBack(record=record):
                        self.tiers.on_written(record.hash, "ok", self.now)
                    case Promote(record=record):
                        self.tiers.on_promoted(record.hash, "ok", self.now)
                    case Erase(disk_slot=slot):
                        self.tiers.on_erased(slot)
                    case _:
                        pass

    def has(self) -> set[str]:
        return {block.decode() for block in self.tiers.hashes()}


def test_a_tenant_over_its_quota_gives_up_its_own_blocks_unused_longest_children_first() -> None:
    store = Store(16, 0, lab=4)
    store.put("shop", "xyz")
    store.put("lab", "ab")
    store.put("lab", "cd")
    store.tiers.lease("reader", Ticket("r"), chain("ab"), store.now)
    store.tiers.release("reader", Ticket("r"), store.now)
    assert store.put("lab", "e") == [BlockHash(b"e")]
    assert store.has() == {"x", "xy", "xyz", "a", "ab", "c", "e"}
    assert store.tiers.tenants.usage() == {"lab": 4}
    store.put("lab", "f")
    assert store.has() == {"x", "xy", "xyz", "a", "ab", "e", "f"}


def test_a_quota_is_over_both_tiers_and_what_goes_leaves_both() -> None:
    store = Store(4, 32, lab=6)
    for i in range(12):
        store.put("lab", chr(ord("a") + i))
    assert store.has() == set("ghijkl")
    assert len(store.tiers.disk) > 0
    assert store.tiers.tenants.n_blocks("lab") == 6


def test_what_is_read_or_pinned_stays_and_then_a_put_is_refused_with_numbers_and_a_time() -> None:
    store = Store(16, 0, lab=3)
    store.put("lab", "abc")
    store.tiers.lease("reader", Ticket("r"), chain("abc"), store.now)
    store.now = 2
    with pytest.raises(OverQuota, match="tenant lab has 3 of the 3 blocks") as refused:
        store.put("lab", "x")
    assert (refused.value.code, refused.value.retry_after_s) == ("over_limit", 3)
    store.tiers.release("reader", Ticket("r"), store.now)
    store.tiers.pin(BlockHash(b"ab"), "hard", until_s=100)
    assert store.put("lab", "x") == [BlockHash(b"x")]
    assert store.has() == {"a", "ab", "x"}
    assert store.put("other", "yz")  # who has no quota is not asked
    store.tiers.pin(BlockHash(b"x"), "soft", until_s=100)
    assert store.put("lab", "z") == [BlockHash(b"z")]  # nothing else can go
    assert store.has() == {"a", "ab", "z", "y", "yz"}


def test_copies_count_without_being_refused_and_the_next_put_of_new_blocks_sets_it_right() -> None:
    store = Store(32, 0, lab=2)
    assert len(store.put("lab", "abcd", copy=True)) == 4
    assert store.tiers.tenants.n_blocks("lab") == 4
    # What is there already is a success also for a tenant over its quota.
    assert store.put("lab", "abc") == [] and store.put("lab", "") == []
    assert store.has() == {"a", "ab", "abc", "abcd"}
    assert store.put("lab", "x") == [BlockHash(b"x")]
    assert store.has() == {"a", "x"}


def test_soft_pinned_blocks_are_the_last_of_a_tenants_own() -> None:
    store = Store(16, 0, lab=3)
    for name in "abc":
        store.put("lab", name)
    store.tiers.pin(BlockHash(b"a"), "soft", until_s=100)
    store.put("lab", "d")
    store.put("lab", "e")
    assert store.has() == {"a", "d", "e"}


def test_a_prompt_longer_than_the_quota_is_kept_from_its_start() -> None:
    store = Store(16, 0, lab=3)
    assert store.put("lab", "abcde") == chain("abc")
    with pytest.raises(OverQuota, match="this prompt's"):
        store.put("lab", "abcde")
    assert store.put("lab", "xy") == chain("xy")


def test_blocks_being_written_count_until_they_are_given_back_or_run_out() -> None:
    store = Store(16, 0, lab=3)
    tiers = store.tiers
    tiers.reserve("p", Ticket("1"), chain("ab"), None, 0, tenant="lab")
    assert len(tiers.reserve("p", Ticket("2"), chain("xy"), None, 0, tenant="lab").places) == 1
    with pytest.raises(OverQuota):
        tiers.reserve("p", Ticket("3"), chain("q"), None, 0, tenant="lab")
    tiers.revoke("p", Ticket("2"))
    assert tiers.reserve("p", Ticket("3"), chain("q"), None, 4, tenant="lab").places
    assert len(tiers.reserve("p", Ticket("4"), chain("uv"), None, 5, tenant="lab").places) == 2


def test_tenants_that_are_not_named_share_a_rule_not_a_quota_and_nobody_has_none() -> None:
    store = Store(32, 0, lab=1, others=2)
    assert len(store.put("shop", "abc")) == 2
    assert len(store.put("bank", "xyz")) == 2
    assert len(store.put("lab", "uvw")) == 1
    assert len(store.put("", "123456")) == 6


def test_blocks_of_an_earlier_start_count_once_their_tenant_names_them() -> None:
    store = Store(16, 0, lab=3)
    store.put("", "ab")  # whose these are is not known
    assert store.tiers.tenants.n_blocks("lab") == 0
    assert store.put("lab", "abcd") == [BlockHash(b"abc")]
    assert store.tiers.tenants.n_blocks("lab") == 3


@given(
    puts=st.lists(
        st.tuples(st.sampled_from(["lab", "shop"]), st.text(alphabet="ab", min_size=1, max_size=6)),
        max_size=40,
    ),
    n_disk=st.sampled_from([0, 5, 30]),
)
def test_nobody_is_over_its_quota_and_nobody_pays_for_another(
    puts: list[tuple[str, str]], n_disk: int
) -> None:
    store = Store(30, n_disk, lab=4, shop=6)
    for tenant, prompt in puts:
        # A tenant's salt is in its hashes: here the case of the letters.
        own, others = (prompt, str.isupper) if tenant == "lab" else (prompt.upper(), str.islower)
        before = {block for block in store.has() if others(block)}
        with contextlib.suppress(OverQuota):
            store.put(tenant, own)
        assert before <= store.has()
        assert store.tiers.tenants.n_blocks("lab") <= 4
        assert store.tiers.tenants.n_blocks("shop") <= 6
        assert store.tiers.tenants.usage() == {
            name: n
            for name, n in (
                ("lab", sum(map(str.islower, store.has()))),
                ("shop", sum(map(str.isupper, store.has()))),
            )
            if n
        }
