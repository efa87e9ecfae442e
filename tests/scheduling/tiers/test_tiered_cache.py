"""Memory over disk: what is written back and promoted, and that nothing is lost or mistaken."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_cache import BlockCache, CacheFull, DuplicateTicket
from halfmoon_scheduling.cache.pins import PinKind, PinRefused, Pins
from halfmoon_scheduling.tiers.disk_map import BlockRecord, DiskBlock, DiskMap
from halfmoon_scheduling.tiers.tier_commands import (
    AnnounceBlocks,
    AnswerLease,
    Erase,
    Promote,
    TierCommand,
    TierOutcome,
    WriteBack,
)
from halfmoon_scheduling.tiers.tier_limits import TierLimits
from halfmoon_scheduling.tiers.tiered_cache import TieredCache
from tests.scheduling.cache.chains import chain
from tests.scheduling.models import model_test

ME = "reader"


class World:
    """The tiers with their bytes: a slot holds the name of the block that was written there."""

    def __init__(self, n_memory: int, n_disk: int, *, low: float = 0.5, high: float = 0.75) -> None:
        memory = BlockCache(
            n_memory, high_watermark=high, low_watermark=low, reservation_ttl_s=3, lease_ttl_s=5,
            pins=Pins(max_held=2),
        )  # fmt: skip
        self.limits = TierLimits(max_writing=2, max_promoting=2, max_queued=4, pause_s=10)
        self.tiers = TieredCache(memory, DiskMap(n_disk), self.limits)
        self.now = 0.0
        self.memory: dict[int, bytes] = {}
        self.disk: dict[int, bytes] = {}
        #: Commands whose I/O goes on.
        self.running: list[WriteBack | Promote | Erase] = []
        self.answers: dict[tuple[str, Ticket], list[BlockHash]] = {}
        self.n_from_disk: dict[tuple[str, Ticket], int] = {}
        #: What somebody who hears the announcements believes.
        self.told: dict[BlockHash, str] = {}
        self.n_tickets = 0

    def ticket(self) -> Ticket:
        self.n_tickets += 1
        return Ticket(f"t{self.n_tickets}")

    def put(self, prompt: str) -> list[BlockHash]:
        """Store what fits of a prompt; what was stored."""
        ticket = self.ticket()
        try:
            reserved = self.tiers.reserve(ME, ticket, chain(prompt), None, self.now)
        finally:
            self.heed()
        for block, slot in reserved.places:
            self.memory[slot] = block
        sums = [sum(block) for block, _ in reserved.places]
        stored = self.tiers.commit(ME, ticket, sums, self.now)
        self.told.update(dict.fromkeys(stored, "memory"))
        self.heed()
        return stored

    def lease(self, prompt: str) -> Ticket:
        ticket = self.ticket()
        self.tiers.lease(ME, ticket, chain(prompt), self.now)
        self.heed()
        return ticket

    def leased(self, prompt: str) -> Ticket:
        """Lease a prompt, and wait until all that it takes is done."""
        ticket = self.lease(prompt)
        self.settle()
        return ticket

    def drop(self, prompt: str) -> None:
        self.tiers.drop(chain(prompt)[::-1], self.now)
        self.heed()
        self.settle()

    def answer(self, ticket: Ticket) -> list[BlockHash] | None:
        return self.answers.get((ME, ticket))

    def stored(self, tier: str = "") -> list[BlockHash]:
        """The blocks of a tier, or of both."""
        return sorted(block for block, here in self.told.items() if tier in ("", here))

    def fill(self, prompts: str, *, pause_s: float = 0.0) -> None:
        """Store prompts one after the other, and wait until all that follows is done."""
        for prompt in prompts.split():
            self.put(prompt)
            self.settle()
            if pause_s:
                self.wait(pause_s)

    def heed(self) -> None:
        """Take commands in: I/O starts, answers and announcements are read."""
        for command in self.tiers.commands():
            self._take(command)

    def _take(self, command: TierCommand) -> None:
        match command:
            case WriteBack() | Promote() | Erase():
                self.running.append(command)
            case AnswerLease(owner=owner, ticket=ticket, places=places, n_from_disk=n_from_disk):
                assert (owner, ticket) not in self.answers, "answered twice"
                assert 0 <= n_from_disk <= len(places)
                self.n_from_disk[owner, ticket] = n_from_disk
                for place in places:
                    assert self.memory[place.slot] == place.hash, "another block's bytes"
                    assert place.checksum == sum(place.hash)
                self.answers[owner, ticket] = [place.hash for place in places]
            case AnnounceBlocks(tier=tier, left=left, came=came):
                for block in left:
                    assert self.told.pop(block) == tier
                for record in came:
                    assert record.hash not in self.told
                    self.told[record.hash] = tier

    def finish(self, index: int = 0, outcome: TierOutcome = "ok") -> None:
        """One I/O ends."""
        command = self.running.pop(index)
        match command:
            case WriteBack(record=record, memory_slot=slot, disk_slot=disk_slot):
                assert self.memory[slot] == record.hash, "the slot was reused during the write"
                self.disk[disk_slot] = record.hash if outcome == "ok" else b"torn"
                self.tiers.on_written(record.hash, outcome, self.now)
            case Promote(record=record, disk_slot=disk_slot, memory_slot=slot):
                self.memory[slot] = self.disk[disk_slot]
                if outcome == "ok" and self.disk[disk_slot] != record.hash:
                    outcome = "corrupt"  # the checksum says so
                self.tiers.on_promoted(record.hash, outcome, self.now)
            case Erase(disk_slot=disk_slot):
                self.disk[disk_slot] = b""
                self.tiers.on_erased(disk_slot)
        self.heed()

    def settle(self) -> None:
        """All I/O ends well."""
        while self.running:
            self.finish()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tiers.on_tick(self.now)
        self.heed()

    def check(self) -> None:
        self.tiers.check()
        assert set(self.told) == set(self.tiers.hashes()), "told otherwise than it is"
        for block, tier in self.told.items():
            assert (tier == "memory") == (block in self.tiers.memory)
        for block in self.tiers.memory.hashes():
            place = self.tiers.memory.get(block)
            assert place is not None and self.memory[place.slot] == block


@pytest.fixture
def world() -> Iterator[World]:
    """A prompt of eight blocks, of which the first four are in memory, too."""
    world = World(8, 8)
    world.fill("abcdefgh")
    yield world
    world.settle()
    world.check()


def test_above_the_watermark_blocks_are_written_back_and_only_then_let_go() -> None:
    world = World(4, 8)
    world.put("abcd")
    assert len(world.running) == 2
    assert world.tiers.memory.n_stored == 4
    world.settle()
    assert world.stored("memory") == chain("ab")
    assert world.stored("disk") == [b"abc", b"abcd"]
    world.check()


def test_a_lease_on_blocks_of_both_tiers_is_answered_when_all_are_in_memory(world: World) -> None:
    n_here = len([block for block in chain("abcdef") if block in world.tiers.memory])
    ticket = world.lease("abcdef")
    assert world.answer(ticket) is None
    world.settle()
    assert world.answer(ticket) == chain("abcdef")
    assert world.n_from_disk[ME, ticket] == 6 - n_here > 0
    assert world.n_from_disk[ME, world.lease("abcdef")] == 0


def test_a_block_that_came_behind_one_that_did_not_is_not_counted(world: World) -> None:
    lost, *behind = [b for b in chain("abcdefgh") if b not in world.tiers.memory]
    assert behind
    ticket = world.lease("abcdefgh")
    promoted = [command.record.hash for command in world.running if isinstance(command, Promote)]
    world.finish(promoted.index(behind[0]))
    world.finish(promoted.index(lost), "corrupt")
    world.settle()
    assert world.answer(ticket) == [block for block in chain("abcdefgh") if block < lost]
    assert world.n_from_disk[ME, ticket] == 0


def test_a_lease_is_let_go_once_whether_it_waits_or_is_held(world: World) -> None:
    held, waiting = world.lease("ab"), world.lease("abcdef")
    assert world.answer(held) is not None
    assert world.answer(waiting) is None
    with pytest.raises(DuplicateTicket):
        world.tiers.lease(ME, waiting, chain("abc"), world.now)
    with pytest.raises(DuplicateTicket):
        world.tiers.reserve(ME, waiting, chain("x"), None, world.now)
    for ticket in (held, waiting):
        assert world.tiers.release(ME, ticket, world.now)
        assert not world.tiers.release(ME, ticket, world.now)
    world.heed()
    world.settle()
    assert world.answer(waiting) is None


def test_a_client_that_is_forgotten_takes_only_its_own_leases_along(world: World) -> None:
    mine = world.lease("abcdef")
    world.tiers.lease("another", mine, chain("abcdef"), world.now)
    world.heed()
    world.tiers.forget_owner("another")
    world.settle()
    assert world.answer(mine) is not None
    assert ("another", mine) not in world.answers


def test_a_lease_does_not_wait_longer_than_it_may_and_gets_the_prefix_that_has_come(
    world: World,
) -> None:
    ticket = world.lease("abcdef")
    world.finish(0)
    world.wait(world.limits.promotion_wait_s)
    assert world.answer(ticket) == chain("abcde")


def test_damaged_bytes_on_the_disk_are_not_served_and_not_found_again(world: World) -> None:
    damaged = world.tiers.disk.get(BlockHash(b"abcde"))
    assert damaged is not None
    world.disk[damaged.slot] = b"damage"
    assert world.answer(world.leased("abcdef")) == chain("abcd")
    assert BlockHash(b"abcde") not in world.tiers
    assert world.disk[damaged.slot] == b""
    assert world.tiers.counts.corrupt == 1


def test_what_is_written_is_not_overtaken_by_puts_they_are_refused_until_it_is() -> None:
    world = World(4, 8, low=0.0, high=0.5)
    world.put("abcd")
    with pytest.raises(CacheFull, match="2 blocks are being written back first") as full:
        world.put("xy")
    assert full.value.retry_after_s <= 0.1
    world.finish()
    world.put("x")
    world.check()


def test_without_a_disk_blocks_are_dropped_and_one_that_has_room_later_is_used() -> None:
    world = World(4, 0)
    world.put("abcd")
    assert not world.running
    assert world.stored() == chain("ab")
    assert world.tiers.counts.dropped == 2
    world.tiers.grow_disk(8)
    assert not world.tiers.disk_is_off
    world.fill("xy")
    assert len(world.stored()) == 4
    assert len(world.tiers.disk) >= 2
    world.check()


def test_a_disk_that_fails_is_left_alone_for_a_while_and_blocks_are_dropped_meanwhile() -> None:
    world = World(4, 8, low=0.0, high=0.5)
    world.put("abcd")
    is_off = []
    while world.running:
        is_off.append(world.tiers.disk_is_off)
        world.finish(0, "failed")
    is_off.append(world.tiers.disk_is_off)
    n = world.limits.max_failures
    assert is_off[:n] == [False] * n and all(is_off[n:])
    world.put("xyz")
    assert not world.running
    world.check()
    world.wait(world.limits.pause_s)
    world.put("pqr")
    assert world.running
    world.settle()
    assert not world.tiers.disk_is_off
    world.check()


def test_before_the_end_what_only_memory_has_is_saved_starts_of_prompts_first() -> None:
    world = World(8, 8)
    world.put("abc")
    world.put("ax")
    world.tiers.save_all(world.now)
    world.heed()
    assert world.tiers.n_to_save == 4
    world.finish()
    assert world.tiers.disk.hashes() == [b"a"]
    world.settle()
    assert world.tiers.n_to_save == 0
    assert sorted(world.tiers.disk.hashes()) == [b"a", b"ab", b"abc", b"ax"]
    world.check()


def test_blocks_are_dropped_on_order_from_both_tiers_but_not_while_they_are_read(
    world: World,
) -> None:
    assert world.stored("memory") == chain("abcd")
    ticket = world.lease("ab")
    world.drop("abcdefgh")
    assert world.stored() == chain("ab")
    assert set(world.disk.values()) == {b""}
    world.tiers.release(ME, ticket, world.now)


def test_a_block_with_other_children_is_not_dropped() -> None:
    world = World(8, 8)
    world.fill("ab ac")
    world.drop("ab")
    assert world.stored() == [b"a", b"ac"]


def test_the_rest_of_a_prefix_is_read_ahead(world: World) -> None:
    world.leased("abcde")
    assert BlockHash(b"abcdef") in world.tiers.memory


def test_a_hard_pinned_block_and_what_is_before_it_stay_in_memory_and_it_is_counted() -> None:
    world = World(4, 8)
    world.put("ab")
    pins = world.tiers.pins
    world.tiers.pin(BlockHash(b"ab"), "hard", until_s=100)
    assert (pins.n_hard, pins.n_held) == (1, 2)
    world.fill("cd ef gh")
    assert {*chain("ab")} <= set(world.stored("memory"))
    world.drop("ab")
    assert BlockHash(b"ab") in world.tiers
    world.wait(100)
    assert (pins.n_hard, pins.n_held) == (0, 0)
    world.drop("ab")
    assert BlockHash(b"a") not in world.tiers


def test_a_soft_pin_survives_write_back_and_is_the_last_to_leave_the_disk() -> None:
    world = World(2, 3, low=0.0, high=0.5)
    world.fill("a b c", pause_s=1)
    assert world.told[BlockHash(b"a")] == "disk"
    world.tiers.pin(BlockHash(b"a"), "soft", until_s=1000)
    world.fill("d e f g h", pause_s=1)
    world.drop("a")
    assert BlockHash(b"a") in world.tiers.disk and world.tiers.pins.n_soft == 1
    assert len(world.tiers.disk) == 3
    for block in world.tiers.disk.hashes():
        world.tiers.pin(block, "soft", until_s=1000)
    world.fill("i j")  # now nothing else can go
    world.check()
    assert len(world.tiers.disk) == 3 and world.tiers.pins.n_soft < 3


def test_a_block_that_is_hard_pinned_on_the_disk_stays_there_whatever_comes() -> None:
    world = World(2, 3, low=0.0, high=0.5)
    world.fill("a b c")
    world.tiers.pin(BlockHash(b"a"), "hard", until_s=1000)
    world.fill("d e f g h")
    assert BlockHash(b"a") in world.tiers.disk
    assert BlockHash(b"b") not in world.tiers


def test_what_is_not_stored_or_too_much_is_not_pinned() -> None:
    world = World(4, 8)
    world.put("abc")
    with pytest.raises(PinRefused, match="not stored"):
        world.tiers.pin(BlockHash(b"x"), "soft", until_s=1)
    with pytest.raises(PinRefused, match="hold 3 more blocks, and 0 of 2"):
        world.tiers.pin(BlockHash(b"abc"), "hard", until_s=1)
    assert world.tiers.pins.n_held == 0


def test_a_damaged_block_goes_whatever_pins_there_are() -> None:
    world = World(4, 8, low=0.0, high=0.25)
    world.fill("ab")
    assert world.told == dict.fromkeys(chain("ab"), "disk")
    world.tiers.pin(BlockHash(b"ab"), "hard", until_s=1000)
    on_disk = world.tiers.disk.get(BlockHash(b"ab"))
    assert on_disk is not None
    world.disk[on_disk.slot] = b"damage"
    world.leased("ab")
    world.check()
    assert BlockHash(b"ab") not in world.tiers and world.tiers.pins.n_held == 0


def test_a_block_damaged_in_memory_goes_before_its_children_and_comes_again_from_the_disk() -> None:
    world = World(8, 8)
    world.put("abc")
    world.tiers.save_all(world.now)
    world.heed()
    world.settle()
    a, b, c = chain("abc")
    assert world.tiers.discard_damaged(a, world.now)
    world.heed()
    world.settle()
    assert (world.told[a], world.told[b], world.told[c]) == ("disk", "memory", "memory")
    assert world.answer(world.leased("abc")) == [a, b, c]
    world.check()


def test_a_block_damaged_in_memory_stays_as_long_as_somebody_reads_it() -> None:
    world = World(4, 8)
    world.put("ab")
    ticket = world.lease("ab")
    assert not world.tiers.discard_damaged(BlockHash(b"a"), world.now)
    world.tiers.release(ME, ticket, world.now)
    assert world.tiers.discard_damaged(BlockHash(b"a"), world.now)
    world.heed()
    assert world.told == {BlockHash(b"ab"): "memory"}
    assert not world.tiers.discard_damaged(BlockHash(b"a"), world.now), "it has gone"
    world.check()


def test_a_block_that_goes_for_one_that_is_fetched_is_announced() -> None:
    world = World(4, 62, low=1.0, high=1.0)
    world.put("wxyz")
    world.tiers.save_all(world.now)
    world.settle()  # memory is full, and all of it is on the disk, too
    with pytest.raises(CacheFull):
        world.put("abcd")
    world.settle()
    world.put("abcd")
    world.tiers.save_all(world.now)
    world.settle()
    here = set(world.tiers.memory.hashes())
    gone = next(block for block in chain("wxyz") if block not in here)
    ticket = world.lease(gone.decode())
    world.settle()
    assert world.answer(ticket) == chain(gone.decode())
    moved = here - set(world.tiers.memory.hashes())
    assert moved, "nothing had to go for it"
    assert all(world.told[block] == "disk" for block in moved)
    world.check()


PROMPTS = st.text(alphabet="ab", min_size=1, max_size=5)


@pytest.mark.parametrize(("high", "low"), [(1.0, 1.0), (1.0, 0.5), (1.0, 0.0), (0.75, 0.75)])
def test_a_full_memory_makes_room_for_puts_and_fetches_whatever_the_watermarks_are(
    high: float, low: float
) -> None:
    world = World(4, 62, low=low, high=high)
    for prompt in ("abcd", "wxyz", "klmn"):
        for _ in range(10):
            with contextlib.suppress(CacheFull):
                world.put(prompt)
            world.settle()
        assert set(chain(prompt)) <= set(world.tiers.hashes()), "it stays full for ever"
    for prompt in ("abcd", "wxyz", "klmn"):
        ticket = world.lease(prompt)
        world.settle()
        assert world.answer(ticket) == chain(prompt)
        world.tiers.release(ME, ticket, world.now)
        world.heed()
    world.check()


def test_a_fetch_into_a_memory_full_of_unsaved_blocks_waits_for_their_writes() -> None:
    world = World(4, 62, low=1.0, high=1.0)
    world.tiers.restore([DiskBlock(BlockRecord(BlockHash(b"a"), None, 0, sum(b"a")), 7)])
    world.disk[7] = b"a"
    world.told[BlockHash(b"a")] = "disk"
    world.put("wxyz")
    ticket = world.lease("a")
    world.settle()
    assert world.answer(ticket) == [b"a"]


class TiersUnderAnyOrder(RuleBasedStateMachine):
    """Puts, leases, I/O that ends in any order, or badly, bytes that change on the disk."""

    n_disk = 6
    may_fail = True
    low, high = 0.5, 0.75

    def __init__(self) -> None:
        super().__init__()
        self.world = World(4, self.n_disk, low=self.low, high=self.high)
        self.asked: dict[Ticket, Sequence[BlockHash]] = {}
        self.committed: set[BlockHash] = set()
        #: Blocks with a hard pin, and until when.
        self.hard: dict[BlockHash, float] = {}

    @rule(prompt=PROMPTS)
    def put(self, prompt: str) -> None:
        with contextlib.suppress(CacheFull):
            self.committed |= set(self.world.put(prompt))

    @rule(prompt=PROMPTS)
    def lease(self, prompt: str) -> None:
        self.asked[self.world.lease(prompt)] = chain(prompt)

    @rule()
    def save_all(self) -> None:
        self.world.tiers.save_all(self.world.now)
        self.world.heed()

    @rule(prompt=PROMPTS)
    def drop(self, prompt: str) -> None:
        if self.may_fail:
            self.world.tiers.drop(chain(prompt)[::-1], self.world.now)
            self.world.heed()

    @rule(prompt=PROMPTS)
    def bytes_in_memory_are_found_damaged(self, prompt: str) -> None:
        block = chain(prompt)[-1]
        if self.may_fail and self.world.tiers.discard_damaged(block, self.world.now):
            assert block not in self.world.tiers.memory
            self.world.heed()

    @rule(prompt=PROMPTS, kind=st.sampled_from(["soft", "hard", "hard"]), for_s=st.integers(1, 20))
    def pin(self, prompt: str, kind: PinKind, for_s: int) -> None:
        block = chain(prompt)[-1]
        with contextlib.suppress(PinRefused):
            self.world.tiers.pin(block, kind, self.world.now + for_s)
            self.hard.pop(block, None)
            if kind == "hard":
                self.hard[block] = self.world.now + for_s

    @rule(prompt=PROMPTS)
    def unpin(self, prompt: str) -> None:
        block = chain(prompt)[-1]
        had = self.world.tiers.pins.get(block) is not None
        assert self.world.tiers.unpin(block) == had
        self.hard.pop(block, None)

    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        if self.asked:
            ticket = list(self.asked)[index % len(self.asked)]
            del self.asked[ticket]
            self.world.tiers.release(ME, ticket, self.world.now)
            self.world.heed()

    @rule()
    def client_gone(self) -> None:
        self.asked.clear()
        self.world.tiers.forget_owner(ME)

    @rule(index=st.integers(0, 20), outcome=st.sampled_from(["ok", "ok", "failed", "corrupt"]))
    def io_ends(self, index: int, outcome: TierOutcome) -> None:
        if self.world.running:
            self.world.finish(index % len(self.world.running), outcome if self.may_fail else "ok")

    @rule(slot=st.integers(0, 5))
    def bytes_change_on_disk(self, slot: int) -> None:
        if self.may_fail and slot in self.world.disk:
            self.world.disk[slot] = b"damage"

    @rule(seconds=st.sampled_from([0.25, 1.0, 6.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @invariant()
    def books_agree(self) -> None:
        self.world.check()
        for ticket, asked in self.asked.items():
            got = self.world.answers.get((ME, ticket))
            assert got is None or list(asked[: len(got)]) == got

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        if not self.world.running:
            assert self.world.tiers.n_promoting == 0

    def teardown(self) -> None:
        """Once all I/O has ended and all clients are gone, nothing is held."""
        self.world.settle()
        self.world.wait(self.world.limits.promotion_wait_s)
        self.world.settle()
        self.world.tiers.forget_owner(ME)
        self.world.wait(20)
        self.world.settle()
        assert self.world.tiers.pins.n_held == self.world.tiers.pins.n_soft == 0
        assert self.world.tiers.n_writing == self.world.tiers.n_promoting == 0
        assert self.world.tiers.memory.n_leased == self.world.tiers.memory.n_reserved == 0


class PinnedBlocksStay(TiersUnderAnyOrder):
    """With a disk that does not hold all blocks there are, and does not fail."""

    n_disk = 3
    may_fail = False

    @invariant()
    def all_with_a_hard_pin_are_there(self) -> None:
        self.hard = {b: until_s for b, until_s in self.hard.items() if until_s > self.world.now}
        for block in self.hard:
            assert all(before in self.world.tiers for before in chain(block.decode()))


class NothingIsLost(TiersUnderAnyOrder):
    """With a disk that holds all blocks there are, and does not fail."""

    n_disk = 62
    may_fail = False

    @invariant()
    def all_that_was_committed_is_there(self) -> None:
        assert all(block in self.world.tiers for block in self.committed)


class MemoryIsFull(TiersUnderAnyOrder):
    """With watermarks that keep no slot free: puts and fetches make room for themselves."""

    n_disk = 12
    low = high = 1.0


class MemoryIsFullAndNothingIsLost(NothingIsLost):
    """The same with a disk that holds all."""

    low = high = 1.0


TestTiers = model_test(TiersUnderAnyOrder, at_night=360, steps_at_night=40)
TestNothingIsLost = model_test(NothingIsLost, at_night=360, steps_at_night=40)
TestMemoryIsFull = model_test(MemoryIsFull, at_night=360, steps_at_night=40)
TestPinnedBlocksStay = model_test(PinnedBlocksStay, at_night=360, steps_at_night=40)
TestMemoryIsFullAndNothingIsLost = model_test(
    MemoryIsFullAndNothingIsLost, at_night=360, steps_at_night=40
)
