"""Which blocks a request of a vLLM server loads and stores."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_vllm.cache_layout import CacheLayout
from halfmoon_vllm.scheduler_side import RequestPart, SchedulerSide

LAYOUT = KvLayout(model="m", n_layers=2, n_kv_heads=2, head_dim=32, dtype="float32", block_size=16)
#: Two blocks of the pool in one of vLLM's.
CACHE = CacheLayout(LAYOUT, ("layer.0", "layer.1"), 32)
A = KvstoreAddress(WorkerId("a"), 1, "tcp://a")
B = KvstoreAddress(WorkerId("b"), 1, "tcp://b")


@dataclass
class Directory:
    """What kvstores hold, by address."""

    held: dict[KvstoreAddress, set[BlockHash]] = field(default_factory=lambda: {A: set(), B: set()})

    def holders(self, hashes: Sequence[BlockHash]) -> list[tuple[KvstoreAddress, int]]:
        found = []
        for address, held in self.held.items():
            n = next((i for i, h in enumerate(hashes) if h not in held), len(hashes))
            found += [(address, n)] if n else []
        return sorted(found, key=lambda pair: -pair[1])

    def home_for(self, first: BlockHash, preferred: str) -> KvstoreAddress | None:
        return next(iter(self.held), None)


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
def side(directory: Directory) -> SchedulerSide:
    return SchedulerSide(CACHE, directory)


def hashes_of(prompt: Sequence[int], salt: str = "") -> list[BlockHash]:
    return block_hashes(prompt, model="m", salt=salt, block_size=16)


PROMPT = list(range(100, 200))


def part(start: int, stop: int, blocks: Sequence[int] = (7, 3, 9, 4)) -> RequestPart:
    return RequestPart("r", blocks, start == 0, start, stop)


def test_a_hit_is_whole_blocks_and_not_the_last_token(
    side: SchedulerSide, directory: Directory
) -> None:
    directory.held[A] = set(hashes_of(PROMPT)[:5])  # 80 tokens: two and a half of its blocks
    side.on_request("r", PROMPT, None)
    assert side.lookup("r", 0) == 64
    assert side.lookup("r", 32) == 32
    assert side.lookup("r", 64) == 0
    directory.held[A] = set(hashes_of(PROMPT[:64]))
    side.on_request("whole", PROMPT[:64], None)
    assert side.lookup("whole", 0) == 32


def test_a_load_names_blocks_places_and_sources(side: SchedulerSide, directory: Directory) -> None:
    hashes = hashes_of(PROMPT)
    directory.held[A], directory.held[B] = set(hashes[:3]), set(hashes[:4])
    side.on_request("r", PROMPT, None)
    assert side.lookup("r", 32) == 32
    side.on_allocated("r", [7, 3], 32)
    (load,) = side.build_orders([], []).loads
    assert load.hashes == tuple(hashes[2:4])
    assert load.places == (6, 7)
    assert load.sources == (B, A)
    later = side.build_orders([], [])
    assert later.loads == () and not later.computes
    assert side.build_orders([part(64, 100)], []).computes


def test_blocks_are_stored_once_in_the_step_in_which_they_begin(side: SchedulerSide) -> None:
    hashes = hashes_of(PROMPT)
    side.on_request("r", PROMPT, None)
    (first,) = side.build_orders([part(0, 40)], []).stores
    assert (first.hashes, first.parent) == (tuple(hashes[:3]), None)
    assert first.places == (14, 15, 6)
    assert first.token_ids == tuple(PROMPT[:48])
    (second,) = side.build_orders([part(40, 100, ())], []).stores
    assert (second.hashes, second.parent) == (tuple(hashes[3:6]), hashes[2])
    assert second.places == (7, 18, 19)
    assert side.build_orders([part(100, 101, ())], []).stores == (), "new tokens are not stored"


def test_what_a_kvstore_has_is_left_out_and_the_rest_goes_there(
    side: SchedulerSide, directory: Directory
) -> None:
    hashes = hashes_of(PROMPT)
    directory.held[B] = set(hashes[:4])
    side.on_request("r", PROMPT, None)
    (order,) = side.build_orders([part(0, 100)], []).stores
    assert order.home == B
    assert (order.hashes, order.parent) == (tuple(hashes[4:6]), hashes[3])


def test_blocks_that_failed_are_not_looked_up_again(
    side: SchedulerSide, directory: Directory
) -> None:
    directory.held[A] = set(hashes_of(PROMPT))
    for request in ("lost", "fine"):
        side.on_request(request, PROMPT, None)
        assert side.lookup(request, 0) == 96
    side.on_allocated("lost", [7, 3, 9], 96)
    side.on_allocated("fine", [11, 12, 13], 96)
    side.on_loads_over(["lost", "fine"], {9})
    assert side.lookup("lost", 0) == 0
    assert side.lookup("fine", 0) == 96


def test_salts_and_tenants_have_own_blocks(directory: Directory) -> None:
    directory.held[A] = set(hashes_of(PROMPT))
    for tenant, salt in (("", "s"), ("lab", ""), ("lab", "s")):
        side = SchedulerSide(CACHE, directory, tenant=tenant)
        side.on_request("r", PROMPT, salt)
        assert side.lookup("r", 0) == 0


def test_without_a_kvstore_all_is_counted_as_not_stored(
    side: SchedulerSide, directory: Directory
) -> None:
    directory.held.clear()
    side.on_request("r", PROMPT, None)
    assert side.build_orders([part(0, 100)], []).stores == ()
    assert side.counts.take()["blocks_not_stored.no_kvstore"] == 6


def test_a_server_may_only_load_or_only_store(directory: Directory) -> None:
    directory.held[A] = set(hashes_of(PROMPT)[:2])
    loading = SchedulerSide(CACHE, directory, stores=False)
    storing = SchedulerSide(CACHE, directory, loads=False)
    for side in (loading, storing):
        side.on_request("r", PROMPT, None)
    assert (loading.lookup("r", 0), storing.lookup("r", 0)) == (32, 0)
    assert loading.build_orders([part(0, 100)], []).stores == ()
    assert len(storing.build_orders([part(0, 100)], []).stores) == 1


def test_who_was_never_told_of_or_is_preempted_starts_anew(side: SchedulerSide) -> None:
    assert side.lookup("lora", 0) == 0
    assert side.build_orders([part(0, 100)], ["lora"]).stores == ()
    side.on_finished("lora")
    side.on_request("r", PROMPT, None)
    side.build_orders([part(0, 40)], [])
    orders = side.build_orders([part(0, 40, (1, 2, 5, 6))], ["r"])
    assert orders.dropped == ("r",)
    assert orders.stores[0].places == (2, 3, 4)
