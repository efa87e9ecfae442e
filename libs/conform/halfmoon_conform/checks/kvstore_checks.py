"""Check a kvstore's memory as a whole: events, eviction, leases, loads and its first layout."""

import asyncio
from typing import Any

import msgspec

from halfmoon_conform.blocks import SMALL_LAYOUT, BlockChain, block_bytes, make_chain
from halfmoon_conform.check import check
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.peers.caller import Caller
from halfmoon_conform.peers.event_listener import EventListener
from halfmoon_conform.peers.wire_maps import WireMap
from halfmoon_conform.played_kvstore import PlayedKvstore
from halfmoon_conform.verdict import CheckFailed, CheckSkipped, require

#: Memory that the kit fills, at the most.
_MAX_FILLED_BYTES = 64 * 1024 * 1024
#: Times that a copy is asked for, half a second apart at the most.
_COPY_TRIES = 40
#: Operations of the random run.
_N_OPERATIONS = 1000
#: Blocks of about so many bytes, so that a small memory holds few of them.
_LARGE_LAYOUT = {**SMALL_LAYOUT, "n_layers": 4, "n_kv_heads": 8, "head_dim": 64}


class Puts:
    """Put, lease and drop blocks through one connection."""

    def __init__(self, context: CheckContext, caller: Caller) -> None:
        self._context, self._caller = context, caller

    async def reserve(self, chain: BlockChain) -> tuple[str, dict[str, Any]]:
        """Reserve room, and return the ticket and the answer, a refusal too."""
        ticket = self._context.name("put")
        await self._caller.send(
            {
                "type": "reserve_blocks",
                "ticket": ticket,
                "layout": chain.layout,
                "hashes": chain.hashes,
                "parent": chain.parent,
                "token_ids": chain.token_ids,
            }
        )
        answer = await self._caller.take(lambda m: m.get("ticket") == ticket, "reserve_blocks")
        return ticket, answer

    async def put(self, chain: BlockChain) -> bool:
        """Put blocks, their bytes too; return whether all are stored."""
        ticket, answer = await self.reserve(chain)
        if answer["type"] != "blocks_reserved":
            return False
        bodies = dict(
            zip(chain.hashes, zip(chain.bodies, chain.checksums, strict=True), strict=True)
        )
        places = answer["places"]
        connection = await self._context.dial(answer["region"]) if places else None
        if connection is not None:
            parts = [(place[1], bodies[place[0]][0]) for place in places]
            statuses = await connection.write_bytes(answer["region"], parts)
            require(not any(statuses), f"writes into reserved places have the statuses {statuses}")
            await connection.close()
        sums = [bodies[place[0]][1] for place in places]
        await self._caller.send({"type": "commit_blocks", "ticket": ticket, "checksums": sums})
        await self._caller.expect({"type": "blocks_committed", "ticket": ticket})
        return not answer.get("not_stored")

    async def leased(self, chain: BlockChain) -> WireMap:
        """Lease blocks, and return the answer."""
        ticket = self._context.name("lease")
        await self._caller.send(
            {
                "type": "lease_blocks",
                "ticket": ticket,
                "layout": chain.layout,
                "hashes": chain.hashes,
            }
        )
        return await self._caller.expect({"type": "blocks_leased", "ticket": ticket})

    async def lease(self, chain: BlockChain) -> tuple[str, int]:
        """Lease blocks, and return the ticket and how many are there."""
        leased = await self.leased(chain)
        return leased["ticket"], len(leased["places"])

    async def count(self, chain: BlockChain) -> int:
        """Return how many blocks of a chain's beginning are stored."""
        ticket, found = await self.lease(chain)
        await self.release(ticket)
        return found

    async def release(self, ticket: str) -> None:
        """Release a lease."""
        await self._caller.send({"type": "release_lease", "ticket": ticket})

    async def snapshot(self) -> dict[str, Any]:
        """Ask for all that is stored."""
        ticket = self._context.name("snapshot")
        await self._caller.send({"type": "snapshot_blocks", "ticket": ticket})
        return await self._caller.expect({"type": "blocks_snapshot", "ticket": ticket})


def apply_events(stored: set[bytes], events: list[dict[str, Any]]) -> None:
    """Change a set of stored hashes as KV events say."""
    for event in events:
        match event["type"]:
            case "BlockStored":
                stored |= set(event["block_hashes"])
            case "BlockRemoved":
                stored -= set(event["block_hashes"])
            case "AllBlocksCleared":
                stored.clear()


def _require_chains(events: list[dict[str, Any]], parents: dict[bytes, bytes | None]) -> None:
    """Require that each stored block of an event continues the one before."""
    for event in events:
        if event["type"] == "BlockStored":
            before = event["parent_block_hash"]
            for block in event["block_hashes"]:
                require(parents[block] == before, "a BlockStored whose hashes are no chain")
                before = block


async def _listener_in_step(context: CheckContext, puts: Puts) -> tuple[EventListener, set[bytes]]:
    """Subscribe, take a snapshot, and return what is stored after the events seen until then."""
    first = context.blocks(1)
    require(await puts.put(first), "no room for one block in an empty memory")
    listener = await context.listen()
    await listener.wait_for(lambda: bool(listener.loads), "load")
    snapshot = await puts.snapshot()
    stored = set(snapshot["hashes"])
    listener.publications[:] = [p for p in listener.publications if p[0] > snapshot["sequence"]]
    return listener, stored


async def _caught_up(listener: EventListener, snapshot: dict[str, Any], seen: int) -> None:
    last = snapshot["sequence"]
    await listener.wait_for(
        lambda: last <= seen or any(number >= last for number, _ in listener.publications),
        f"event {last}, which the snapshot names",
    )


@check(
    "kvstore.events.truth",
    roles=("kvstore",),
    needs="fresh",
    says="A subscriber that sees a gap asks for a snapshot. Then it applies the events after the"
    " snapshot's number.",
)
async def _truth(context: CheckContext) -> None:
    """Compare events, snapshot and leases after a thousand random operations."""
    caller = await context.connect()
    puts = Puts(context, caller)
    listener, stored = await _listener_in_step(context, puts)
    started = (await puts.snapshot())["sequence"]
    chance = context.chance
    chains: list[BlockChain] = []
    drops = context.subject.record.get("replicates", False)
    for _ in range(_N_OPERATIONS):
        roll = chance.random()
        if roll < 0.35 or not chains:
            after = chance.choice(chains).hashes[-1] if chains and chance.random() < 0.4 else None
            chain = context.blocks(chance.randint(1, 3), after)
            ticket, answer = await puts.reserve(chain)
            if answer["type"] != "blocks_reserved":
                continue
            if chance.random() < 0.2:
                await caller.send({"type": "revoke_blocks", "ticket": ticket})
                continue
            sums = dict(zip(chain.hashes, chain.checksums, strict=True))
            sums_of_places = [sums[place[0]] for place in answer["places"]]
            await caller.send(
                {"type": "commit_blocks", "ticket": ticket, "checksums": sums_of_places}
            )
            await caller.expect({"type": "blocks_committed", "ticket": ticket})
            chains.append(chain)
        elif roll < 0.7:
            await puts.count(chance.choice(chains))
        elif roll < 0.8 and drops:
            await caller.send({"type": "drop_blocks", "hashes": chance.choice(chains).hashes[::-1]})
        else:
            again = chance.choice(chains)
            ticket, answer = await puts.reserve(again)
            if answer["type"] == "blocks_reserved":
                await caller.send({"type": "revoke_blocks", "ticket": ticket})
    await caller.settle()
    snapshot = await puts.snapshot()
    await _caught_up(listener, snapshot, started)
    numbers = [number for number, _ in listener.publications if number <= snapshot["sequence"]]
    wanted = list(range(started + 1, snapshot["sequence"] + 1))
    require(
        numbers == wanted,
        f"numbers of events: {numbers[:20]}…, not {wanted[:20]}…; 8 bytes each, signed, big-endian",
    )
    parents: dict[bytes, bytes | None] = {}
    for chain in chains:
        parents.update(zip(chain.hashes, [chain.parent, *chain.hashes], strict=False))
    for number, events in listener.publications:
        if number <= snapshot["sequence"]:
            apply_events(stored, events)
            _require_chains(events, parents)
    told, listed = len(stored), len(snapshot["hashes"])
    require(
        stored == set(snapshot["hashes"]),
        f"events tell of {told} blocks, the snapshot of {listed}, and they differ",
    )
    for chain in chance.sample(chains, min(40, len(chains))):
        known = 0
        while known < len(chain.hashes) and chain.hashes[known] in stored:
            known += 1
        found = await puts.count(chain)
        require(found == known, f"leased {found} blocks of a chain of which events tell {known}")


async def _small_memory(context: CheckContext) -> tuple[Puts, Caller, int]:
    """Give the subject a layout of large blocks, and return how many blocks fit."""
    if context.subject.record.get("layout"):
        raise CheckSkipped("it has a layout already, and the kit would fill it")
    caller = await context.connect()
    puts = Puts(context, caller)
    context.subject.record["layout"] = _LARGE_LAYOUT
    require(await puts.put(context.blocks(1)), "no room for one block in an empty memory")
    welcome = await caller.expect({"type": "welcome"})
    n_blocks = welcome["worker"].get("n_blocks", 0)
    size = block_bytes(_LARGE_LAYOUT)
    if not 4 <= n_blocks <= _MAX_FILLED_BYTES // size:
        raise CheckSkipped(
            f"its memory holds {n_blocks} blocks of {size} bytes: start it with 2 to"
            f" {_MAX_FILLED_BYTES // 2**20} MiB for this check"
        )
    return puts, caller, n_blocks


@check(
    "kvstore.eviction.children-first",
    roles=("kvstore",),
    needs="fresh",
    says="A block is evicted only after all blocks that continue it, reserved ones included.",
)
async def _children_first(context: CheckContext) -> None:
    puts, caller, n_blocks = await _small_memory(context)
    listener = await context.listen()
    await listener.wait_for(lambda: bool(listener.loads), "load")
    parents: dict[bytes, bytes | None] = {}
    chains = []
    for _ in range(2 * n_blocks // 3 + 2):
        chain = context.blocks(3)
        chains.append(chain)
        parents.update(zip(chain.hashes, [None, *chain.hashes], strict=False))
        require(await puts.put(chain), "full, though nothing is leased: it evicts nothing")
    await caller.settle()
    await _caught_up(listener, await puts.snapshot(), -1)
    stored: set[bytes] = set()
    n_removed = 0
    for event in listener.events():
        if event["type"] == "BlockRemoved":
            gone = set(event["block_hashes"])
            n_removed += len(gone)
            for each in stored - gone:
                require(
                    parents.get(each) not in gone, "removed a block before one that continues it"
                )
        apply_events(stored, [event])
    require(n_removed > 0, "stored more than fits and told of no removed block")
    for chain in chains:
        there = [each in stored for each in chain.hashes]
        require(there == sorted(there, reverse=True), "kept a block without the one before it")


@check(
    "kvstore.eviction.leased-stay",
    roles=("kvstore",),
    needs="fresh",
    says="A get takes a lease, reads, and releases. Leased blocks are not evicted.",
)
async def _leased_stay(context: CheckContext) -> None:
    puts, caller, n_blocks = await _small_memory(context)
    held = context.blocks(1)
    require(await puts.put(held), "no room for a second block")
    ticket, found = await puts.lease(held)
    require(found == 1, "a block that was just put is not there")
    for _ in range(n_blocks + 2):
        await puts.put(context.blocks(1))
        await caller.send({"type": "renew_lease", "ticket": ticket})
    require(await puts.count(held) == 1, "evicted a leased block")


@check(
    "kvstore.eviction.parent-stays",
    roles=("kvstore",),
    needs="fresh",
    says="A put evicts neither its `parent` nor stored blocks among its `hashes`; it rather gets no"
    " room.",
)
async def _parent_stays(context: CheckContext) -> None:
    puts, _, n_blocks = await _small_memory(context)
    blocks = [context.blocks(1) for _ in range(n_blocks)]
    for block in blocks:
        require(await puts.put(block), "full, though nothing is leased: it evicts nothing")
    listed = (await puts.snapshot())["hashes"]
    oldest = next(block.hashes[0] for block in blocks if block.hashes[0] in listed)
    await puts.put(context.blocks(n_blocks // 2, oldest))
    listed = (await puts.snapshot())["hashes"]
    require(oldest in listed, "evicted the parent of blocks that were put")


@check(
    "kvstore.eviction.least-recent",
    roles=("kvstore",),
    needs="fresh",
    says="The least recently put or leased go first, of one prompt the last blocks.",
)
async def _least_recent(context: CheckContext) -> None:
    puts, caller, n_blocks = await _small_memory(context)
    old = [context.blocks(1) for _ in range(n_blocks // 2)]
    for block in old:
        require(await puts.put(block), "no room in a memory that is half empty")
    require(await puts.count(old[0]) == 1, "a block that was put is not there")
    # The rest of the memory, and the room of half of the old ones.
    for _ in range(3 * n_blocks // 4):
        require(await puts.put(context.blocks(1)), "full, though nothing is leased")
    await caller.settle()
    listed = (await puts.snapshot())["hashes"]
    there = [block.hashes[0] in listed for block in old]
    require(not all(there), "stored more than fits and evicted none of the oldest blocks")
    require(there[0], "evicted a block that was leased after all others were put")
    require(there[1:] == sorted(there[1:]), "evicted a block before one that was put earlier")


@check(
    "kvstore.put.tail-without-room",
    roles=("kvstore",),
    needs="fresh",
    says="the first ones of the prompt get places, a tail may get none",
)
async def _tail_without_room(context: CheckContext) -> None:
    puts, _, n_blocks = await _small_memory(context)
    chain = context.blocks(n_blocks + 2)
    _, answer = await puts.reserve(chain)
    if answer["type"] == "kvstore_refused":
        require(answer["code"] == "too_long", f"refused with {answer.get('code')!r}")
        return
    got = [place[0] for place in answer["places"]]
    require(0 < len(got) <= n_blocks, f"gave {len(got)} places, and {n_blocks} blocks fit")
    require(got == chain.hashes[: len(got)], "its places are not of the first hashes")
    left = set(answer.get("not_stored", []))
    require(left == set(chain.hashes[len(got) :]), "not_stored is not the rest of the hashes")


@check(
    "kvstore.layout.stays-after-revocation",
    roles=("kvstore",),
    needs="fresh",
    says="The layout stays until the process ends, also when that reservation is revoked or runs"
    " out.",
)
async def _layout_stays(context: CheckContext) -> None:
    _require_unused(context)
    caller = await context.connect()
    puts = Puts(context, caller)
    ticket, answer = await puts.reserve(context.blocks(1))
    require(answer["type"] == "blocks_reserved", "refused a first put")
    await caller.send({"type": "revoke_blocks", "ticket": ticket})
    other = make_chain(context.chance, {**SMALL_LAYOUT, "model": "another"}, 1)
    _, answer = await puts.reserve(other)
    require(answer["type"] == "kvstore_refused", "took another layout after a revocation")
    require(await puts.put(context.blocks(1)), "refused the first layout after a revocation")


@check(
    "kvstore.unwelcome.no-more-welcomes",
    roles=("kvstore",),
    needs="fresh",
    says="Sent again when it changes, to each connection that said `hello` and no `unwelcome`"
    " since.",
)
async def _no_more_welcomes(context: CheckContext) -> None:
    if context.subject.record.get("layout"):
        raise CheckSkipped("it has a layout already: no change of its record can be caused")
    left, stays = await context.connect(), await context.connect()
    await left.send({"type": "unwelcome", "reason": "conformance"})
    await left.settle()
    before = left.received.count("welcome")
    puts = Puts(context, await context.connect(hello=False))
    require(await puts.put(context.blocks(1)), "no room for one block in an empty memory")
    await stays.expect({"type": "welcome"})
    await left.settle()
    after = left.received.count("welcome")
    require(after == before, "sent a welcome to a connection that had said unwelcome")


@check(
    "kvstore.drain.leases-go-on",
    roles=("kvstore",),
    needs="killable",
    says="One that drains (`draining` in its record) refuses puts and goes on with leases.",
)
async def _drain(context: CheckContext) -> None:
    subject = context.subject
    puts = Puts(context, caller := await context.connect())
    chain = context.blocks(1)
    require(await puts.put(chain), "no room for one block")
    ticket, _ = await puts.lease(chain)
    await subject.ask_to_stop()

    async def drains_or_ended() -> bool:
        record = await subject.read_record() or {}
        return bool(record.get("draining")) or not (subject.process and subject.process.running)

    await context.until(drains_or_ended, "it drains, or ends, when it is asked to", 40)
    if not subject.record.get("draining") or not (subject.process and subject.process.running):
        raise CheckSkipped("it ends without a drain")
    _, answer = await puts.reserve(context.blocks(1))
    require(answer["type"] == "kvstore_refused", "took a put while it drains")
    require(answer.get("code") == "draining", f"refused with the code {answer.get('code')!r}")
    require(await puts.count(chain) == 1, "leases nothing while it drains")
    await caller.send({"type": "renew_lease", "ticket": ticket})
    await caller.expect({"type": "lease_renewed", "ticket": ticket})


@check(
    "kvstore.load.missing-behind",
    roles=("kvstore",),
    needs="fresh",
    says="Blocks behind the first one that is missing are missing too, even if they are stored.",
)
async def _missing_behind(context: CheckContext) -> None:
    _require_unused(context)
    puts = Puts(context, await context.connect())
    chain = context.blocks(4)
    require(await puts.put(chain.first(1)), "no room for a block in an empty memory")
    last = make_chain(context.chance, chain.layout, 1, chain.hashes[2])
    require(await puts.put(last), "no room for a second block")
    listener = await context.listen()
    asked = BlockChain(chain.layout, None, [], [*chain.hashes[:3], last.hashes[0]], [b""] * 4)
    require(await puts.count(asked) == 1, "leased a block behind one that is missing")

    def right() -> bool:
        load = listener.loads[-1] if listener.loads else {}
        return (load.get("n_found_in_memory"), load.get("n_missing")) == (1, 3)

    await listener.wait_for(right, "load that counts 1 block as found and 3 as missing")


@check(
    "kvstore.snapshot.room",
    roles=("kvstore",),
    needs="fresh",
    says="`room_bytes` in a snapshot is what fits without evicting",
)
async def _room(context: CheckContext) -> None:
    puts, _, n_blocks = await _small_memory(context)
    size = block_bytes(_LARGE_LAYOUT)
    room = (await puts.snapshot())["room_bytes"]
    most = (n_blocks - 1) * size
    # A kvstore may evict ahead of demand, and calls what is above its watermark no room.
    require(most // 2 <= room <= most, f"says room for {room} bytes, and {most} are free")
    require(await puts.put(context.blocks(2)), "no room for two further blocks")
    await puts.reserve(context.blocks(1))
    left = (await puts.snapshot())["room_bytes"]
    require(left == room - 3 * size, f"three blocks of {size} bytes took {room - left} of its room")


@check(
    "kvstore.put.no-room",
    roles=("kvstore",),
    needs="fresh",
    says="No, why, and when to ask again.",
)
async def _no_room(context: CheckContext) -> None:
    puts, _, n_blocks = await _small_memory(context)
    promised = 0
    for _ in range(n_blocks + 2):
        _, answer = await puts.reserve(context.blocks(1))
        if answer["type"] == "kvstore_refused":
            require(answer["reason"], "refused without a reason")
            require(answer.get("retry_after_s", 0) > 0, "refused without a time to ask again")
            return
        promised += len(answer["places"])
        if answer.get("not_stored"):
            return
    raise CheckFailed(f"promised {promised} places, and {n_blocks} blocks fit")


@check(
    "kvstore.load.counts",
    roles=("kvstore",),
    needs="fresh",
    says="How full memory and disk are, counts of requests, and the number of the last KV event,"
    " which shows gaps.",
)
async def _load_counts(context: CheckContext) -> None:
    _require_unused(context)
    caller = await context.connect()
    puts = Puts(context, caller)
    chain = context.blocks(3)
    require(await puts.put(chain), "no room for three blocks in an empty memory")
    await puts.reserve(context.blocks(2))
    await puts.lease(chain.first(2))
    sequence = (await puts.snapshot())["sequence"]
    listener = await context.listen()

    def right() -> bool:
        load = listener.loads[-1] if listener.loads else {}
        counts = [load.get(f"n_{name}") for name in ("stored", "reserved", "leased")]
        return counts == [3, 2, 2] and load.get("sequence") == sequence

    await listener.wait_for(right, "load of 3 stored, 2 reserved and 2 leased blocks")


@check(
    "kvstore.layout.of-registered-workers",
    roles=("kvstore",),
    needs="fresh",
    says="While a prefill or decode worker is registered, the first put is taken if it has that"
    " worker's layout, and refused otherwise.",
)
async def _registered_layout(context: CheckContext) -> None:
    _require_unused(context)
    registered = {
        "worker_id": "conform-decode",
        "role": "decode",
        "generation": 1,
        "host": "elsewhere",
        "commands": "tcp://127.0.0.1:1",
        "events": "tcp://127.0.0.1:1",
        "layout": SMALL_LAYOUT,
    }
    key = "halfmoon/members/conform-decode"
    await asyncio.to_thread(
        context.subject.store.put, key, msgspec.json.encode(registered), ttl_s=60.0
    )
    context.remove_on_end(key)
    puts = Puts(context, await context.connect())
    other = make_chain(context.chance, {**SMALL_LAYOUT, "model": "another"}, 1)
    _, answer = await puts.reserve(other)
    require(answer["type"] == "kvstore_refused", "took a first put of another layout")
    require(await puts.put(context.blocks(1)), "did not take the first put of the worker's layout")


@check(
    "kvstore.restart.tells-the-truth",
    roles=("kvstore",),
    needs="killable",
    says="All hashes, the event number that this state is after, and how much room there is.",
)
async def _restart_truth(context: CheckContext) -> None:
    """Kill it among puts: what the new process lists is what it serves, whole and unchanged."""
    puts = Puts(context, await context.connect())
    chains = [context.blocks(2) for _ in range(8)]
    for chain in chains:
        await puts.put(chain)
    await puts.reserve(context.blocks(2))
    await context.subject.kill()
    await context.subject.restart()
    puts = Puts(context, await context.connect())
    listed = set((await puts.snapshot())["hashes"])
    for chain in chains:
        known = 0
        while known < 2 and chain.hashes[known] in listed:
            known += 1
        found = await puts.count(chain)
        require(found == known, f"lists {known} blocks of a chain and serves {found}")


@check(
    "kvstore.snapshot.pages",
    roles=("kvstore",),
    says="With `page`, in pages of about so many hashes.",
)
async def _snapshot_pages(context: CheckContext) -> None:
    """Join what pages of one hash tell, however many they are."""
    caller = await context.connect()
    chain = context.blocks(3)
    require(await Puts(context, caller).put(chain), "no room for three blocks")
    await caller.send({"type": "snapshot_blocks", "ticket": "pages", "page": 1})
    listed: list[bytes] = []
    n_after: int | None = None
    sequences = set()
    while n_after != 0:
        page = await caller.expect({"type": "blocks_snapshot", "ticket": "pages"})
        sequences.add(page["sequence"])
        before = page.get("n_before", 0)
        require(before == len(listed), f"n_before is {before} after {len(listed)} hashes")
        listed += page["hashes"]
        left = page.get("n_after", 0)
        require(page["hashes"] or not left, "a page without hashes that is not the last")
        require(
            n_after is None or left + len(page["hashes"]) == n_after,
            f"n_after is {left} after a page of {len(page['hashes'])} that left {n_after}",
        )
        n_after = left
    require(len(sequences) == 1, "the pages of one snapshot are after several events")
    require(set(chain.hashes) <= set(listed), "the pages leave blocks out")


# -- several places at once ------------------------------------------------------------------------


@check(
    "kvstore.get.slice-over-places",
    roles=("kvstore",),
    says="A slice may begin and end anywhere in what its key opens, and may cover several places or"
    " pages that lie side by side.",
)
async def _slice_over_places(context: CheckContext) -> None:
    puts = Puts(context, await context.connect())
    chain = context.blocks(8)
    require(await puts.put(chain), "not all of 8 blocks are stored")
    leased = await puts.leased(chain)
    size = block_bytes(chain.layout)
    bodies = dict(zip(chain.hashes, chain.bodies, strict=True))
    at = {offset: bodies[block] for block, offset, _ in leased["places"]}
    both = next((offset for offset in at if offset + size in at), None)
    if both is None:
        raise CheckSkipped("no two of 8 places lie side by side")
    connection = await context.dial(leased["region"])
    start = both + size // 2
    ((status, read),) = await connection.read_bytes(leased["region"], [(start, size)])
    require(status == 0, f"a slice over two places has the status {status}")
    wanted = at[both][size // 2 :] + at[both + size][: size // 2]
    require(read == wanted, "a slice over two places has other bytes")


# -- copies ----------------------------------------------------------------------------------------


class _Copies:
    """Have the subject copy blocks from a kvstore of the kit's."""

    def __init__(self, context: CheckContext, caller: Caller, source: PlayedKvstore) -> None:
        self.context, self.caller, self.source = context, caller, source
        self.puts = Puts(context, caller)

    @classmethod
    async def open(cls, context: CheckContext) -> "_Copies":
        """Connect, and open a source; a subject without a layout gets the kit's."""
        caller = await context.connect()
        copies = cls(context, caller, await PlayedKvstore.open(context))
        await copies.puts.put(context.blocks(1))
        return copies

    async def copy(
        self, chain: BlockChain, *, token_ids: list[int] | None = None, may_refuse: bool = False
    ) -> int:
        """Return the number of blocks that it says are stored now; wait while it copies others."""
        token_ids = chain.token_ids if token_ids is None else token_ids
        answer = await self._ask(chain, token_ids)
        for _ in range(_COPY_TRIES):
            if answer["type"] != "kvstore_refused" or answer.get("code") != "no_room":
                break
            await asyncio.sleep(min(answer.get("retry_after_s") or 0.5, 0.5))
            answer = await self._ask(chain, token_ids)
        kind = answer["type"]
        if may_refuse and kind == "kvstore_refused":
            return 0
        require(kind == "blocks_replicated", f"answered {kind}: {answer.get('reason', '')}")
        return int(answer["n_blocks"])

    async def _ask(self, chain: BlockChain, token_ids: list[int]) -> WireMap:
        ticket = self.context.name("copy")
        await self.caller.send(
            {
                "type": "replicate_blocks",
                "ticket": ticket,
                "source": self.source.port.address,
                "layout": chain.layout,
                "hashes": chain.hashes,
                "parent": chain.parent,
                "token_ids": token_ids,
            }
        )
        return await self.caller.take(lambda m: m.get("ticket") == ticket, "replicate_blocks")

    async def require_served(self, chain: BlockChain) -> None:
        """See that a lease has the chain's blocks, with their bytes."""
        leased = await self.puts.leased(chain)
        found = [place[0] for place in leased["places"]]
        require(found == chain.hashes, "a lease has not all blocks that it says are stored")
        size = block_bytes(chain.layout)
        connection = await self.context.dial(leased["region"])
        for place, body, total in zip(leased["places"], chain.bodies, chain.checksums, strict=True):
            ((status, read),) = await connection.read_bytes(leased["region"], [(place[1], size)])
            require(status == 0 and read == body, "serves other bytes than its source")
            require(place[2] == total, "says another checksum than its source")
        await connection.close()
        await self.puts.release(leased["ticket"])


@check(
    "kvstore.replicate.copies",
    roles=("kvstore",),
    claims=("replicates",),
    says="Please copy these from another kvstore: they are hot, or it is about to leave.",
)
async def _copied(context: CheckContext) -> None:
    copies = await _Copies.open(context)
    for knows_tokens in (True, False):
        chain = context.blocks(3)
        for each, body in zip(chain.hashes, chain.bodies, strict=True):
            copies.source.keep(each, body)
        n_blocks = await copies.copy(chain, token_ids=chain.token_ids if knows_tokens else [])
        require(n_blocks == 3, f"{n_blocks} of 3 blocks are stored")
        await copies.require_served(chain)


@check(
    "kvstore.replicate.what-is-left",
    roles=("kvstore",),
    claims=("replicates",),
    says="That may be fewer than were asked for: what the source no longer has is left out.",
)
async def _copied_in_part(context: CheckContext) -> None:
    copies = await _Copies.open(context)
    chain = context.blocks(3)
    for each, body in zip(chain.hashes[:2], chain.bodies[:2], strict=True):
        copies.source.keep(each, body)
    n_blocks = await copies.copy(chain)
    require(n_blocks == 2, f"{n_blocks} blocks are stored, and the source has 2")
    await copies.require_served(chain.first(2))
    require(await copies.puts.count(chain) == 2, "serves a block that the source does not have")


@check(
    "kvstore.replicate.damaged-source",
    roles=("kvstore",),
    claims=("replicates",),
    says="Bytes that are not what their checksum says are not stored: they and those behind them"
    " are left out, or the answer is `kvstore_refused`, `peer_failed`.",
)
async def _copied_damaged(context: CheckContext) -> None:
    copies = await _Copies.open(context)
    chain = context.blocks(2)
    for each, body in zip(chain.hashes, chain.bodies, strict=True):
        copies.source.keep(each, body)
    offset, total = copies.source.stored[chain.hashes[1]]
    copies.source.stored[chain.hashes[1]] = (offset, total ^ 1)
    n_blocks = await copies.copy(chain, may_refuse=True)
    require(n_blocks <= 1, "copied bytes that are not what their checksum says")
    require(await copies.puts.count(chain) <= 1, "serves bytes that are not what they should be")


def _require_unused(context: CheckContext) -> None:
    """Skip a check that counts from zero, at a kvstore that was used before."""
    if context.subject.record.get("layout"):
        raise CheckSkipped("it has a layout already")
