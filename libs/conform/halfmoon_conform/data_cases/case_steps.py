"""Perform the steps of a case, one function each; docs/conformance.md describes them.

A step is a map with one key, its name. `put`, `lease` and `stored` stand for several others.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from halfmoon_conform.blocks import BlockChain, make_chain
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.data_cases.case_values import CaseError, RunIds, fill
from halfmoon_conform.pattern_matcher import difference
from halfmoon_conform.peers.caller import Caller
from halfmoon_conform.peers.event_listener import EventListener
from halfmoon_conform.peers.transfer_connection import HungUp
from halfmoon_conform.verdict import CheckFailed, CheckSkipped, require

Arguments = dict[str, Any]


class CaseRun:
    """One run of a case: what its steps captured and opened."""

    def __init__(self, context: CheckContext) -> None:
        self.context = context
        self.known: dict[str, Any] = {
            "id": RunIds(context.name),
            "layout": context.layout,
            "record": context.subject.record,
            "load_type": f"{context.subject.record.get('role')}_load",
        }
        self._callers: dict[str, Caller] = {}
        self._listeners: dict[str, EventListener] = {}

    async def perform(self, step: Arguments) -> None:
        """Perform one step.

        Raises:
            CaseError: there is no such step, or it names something unknown.
            CheckFailed: the subject did something else.
        """
        if len(step) != 1:
            raise CaseError(f"a step has one key, its name: {step!r}")
        ((name, arguments),) = step.items()
        if name not in STEPS:
            raise CaseError(f"no step {name!r}; there are {', '.join(STEPS)}")
        # The steps inside `eventually` are filled in each time.
        filled = arguments if name == "eventually" else fill(arguments, self.known)
        await STEPS[name](self, filled)

    # -- connections ---------------------------------------------------------------------------

    async def connect(self, given: Arguments) -> None:
        """`connect: {as: a, hello: true, name: n}`."""
        caller = await self.context.connect(given.get("name"), hello=given.get("hello", True))
        self._callers[given["as"]] = caller

    async def close(self, given: Arguments) -> None:
        """`close: {at: a}`."""
        await self._caller(given).close()

    async def listen(self, given: Arguments) -> None:
        """`listen: {as: e}`; returns when a first report of the load has arrived."""
        listener = await self.context.listen()
        self._listeners[given["as"]] = listener
        if self.context.subject.record.get("layout") or given.get("wait", True) is not False:
            await listener.wait_for(lambda: bool(listener.loads), "load")

    # -- messages ------------------------------------------------------------------------------

    async def send(self, given: Arguments) -> None:
        """`send: {at: a, message: {…}}`."""
        await self._caller(given).send(given["message"])

    async def send_frames(self, given: Arguments) -> None:
        """`send_frames: {at: a, frames: [bytes, …]}`."""
        await self._caller(given).send_frames(*given["frames"])

    async def expect(self, given: Arguments) -> None:
        """`expect: {at: a, message: pattern, as: name, within_s: 20}`."""
        within_s = given.get("within_s")
        found = await self._caller(given).expect(given["message"], within_s=within_s)
        self._capture(given, found)

    async def expect_none(self, given: Arguments) -> None:
        """`expect_none: {at: a, message: pattern}`."""
        await self._caller(given).expect_none(given["message"])

    async def expect_event(self, given: Arguments) -> None:
        """`expect_event: {at: e, event: pattern, as: name}`."""
        listener = self._listeners[given["at"]]

        def found() -> list[Any]:
            return [e for e in listener.events() if not difference(given["event"], e)]

        what = f"event like {given['event']!r:.200}"
        await listener.wait_for(lambda: bool(found()), what, given.get("within_s"))
        self._capture(given, found()[0])

    async def expect_load(self, given: Arguments) -> None:
        """`expect_load: {at: e, message: pattern}`: a report that matches is published."""
        listener = self._listeners[given["at"]]
        pattern = given["message"]
        await listener.wait_for(
            lambda: any(not difference(pattern, load) for load in listener.loads),
            f"load like {pattern!r:.200}",
        )

    async def expect_stored(self, given: Arguments) -> None:
        """`expect_stored: {at: e, blocks: $p}`: events that store each block behind its parent."""
        listener, chain = self._listeners[given["at"]], given["blocks"]
        wanted = dict(zip(chain.hashes, [chain.parent, *chain.hashes], strict=False))
        size = chain.layout["block_size"]

        def stored() -> bool:
            found = {}
            for event in listener.events():
                if event["type"] == "BlockStored":
                    parent = event.get("parent_block_hash")
                    for each in event["block_hashes"]:
                        found[each], parent = (parent, event["block_size"]), each
            return all(found.get(each) == (parent, size) for each, parent in wanted.items())

        await listener.wait_for(
            stored, "BlockStored of these blocks, each with its parent", given.get("within_s")
        )

    async def match_sequences(self, given: Arguments) -> None:
        """`match_sequences: {at: e, last: n}`: numbers that were seen have no gap, up to n."""
        listener = self._listeners[given["at"]]
        last = given["last"]
        await listener.wait_for(
            lambda: any(number >= last for number, _ in listener.publications), f"event {last}"
        )
        numbers = [number for number, _ in listener.publications]
        wanted = list(range(numbers[0], numbers[0] + len(numbers)))
        require(numbers == wanted, f"published the numbers {numbers}, not {wanted}")
        limit = given.get("at_most")
        require(limit is None or numbers[0] <= limit, f"the first number seen is {numbers[0]}")

    async def match(self, given: Arguments) -> None:
        """`match: {value: v, pattern: p}`."""
        if wrong := difference(given["pattern"], given["value"]):
            raise CheckFailed(wrong)

    # -- blocks --------------------------------------------------------------------------------

    async def blocks(self, given: Arguments) -> None:
        """`blocks: {as: p, count: n, after: q, layout: {…}}` or `{as: p, first: n, of: q}`."""
        if "of" in given:
            made = given["of"].first(given["first"])
        else:
            after: BlockChain | None = given.get("after")
            layout = {**self.context.layout, **given.get("layout", {})}
            parent = after.hashes[-1] if after else None
            made = make_chain(self.context.chance, layout, given["count"], parent)
        self.known[given["as"]] = made

    async def chain(self, given: Arguments) -> None:
        """`chain: {as: pq, of: [$p, $q]}`: blocks that follow each other as one run."""
        parts: list[BlockChain] = given["of"]
        self.known[given["as"]] = BlockChain(
            parts[0].layout,
            parts[0].parent,
            [token for part in parts for token in part.token_ids],
            [each for part in parts for each in part.hashes],
            [body for part in parts for body in part.bodies],
        )

    async def ensure_layout(self, given: Arguments) -> None:
        """`ensure_layout: {at: a}`: put a block if the subject is a kvstore that may be empty."""
        if self.context.subject.record.get("role") == "kvstore":
            chain = make_chain(self.context.chance, self.context.layout, 1)
            await self.put({"at": given["at"], "blocks": chain})

    async def put(self, given: Arguments) -> None:
        """`put: {at: a, blocks: $p, ticket: t}`: reserve, write, commit, expect success."""
        chain: BlockChain = given["blocks"]
        ticket = given.get("ticket") or self.context.name("put")
        at = {"at": given["at"]}
        reserve = reserve_message(ticket, chain, given.get("tenant", ""))
        await self.send({**at, "message": reserve})
        caller = self._caller(at)
        reserved = await caller.expect({"type": "blocks_reserved", "ticket": ticket})
        places = reserved["places"]
        got = [place[0] for place in places]
        require(
            sorted(got) == sorted(chain.hashes),
            f"reserved {len(places)} places for {len(chain.hashes)} new blocks",
        )
        require(got == chain.hashes, "its places are in another order than the hashes")
        await self.write({"blocks": chain, "to": reserved})
        commit = {"type": "commit_blocks", "ticket": ticket, "checksums": chain.checksums}
        await self.send({**at, "message": commit})
        await caller.expect({"type": "blocks_committed", "ticket": ticket})

    async def lease(self, given: Arguments) -> None:
        """`lease: {at: a, blocks: $p, ticket: t, count: n, as: name}`: expect the first n."""
        chain: BlockChain = given["blocks"]
        ticket = given.get("ticket") or self.context.name("lease")
        await self.send({"at": given["at"], "message": lease_message(ticket, chain)})
        leased = await self._caller(given).expect({"type": "blocks_leased", "ticket": ticket})
        count = given.get("count", len(chain.hashes))
        found = [place[0] for place in leased.get("places", [])]
        require(
            found == chain.hashes[:count],
            f"leased {len(found)} of {len(chain.hashes)} blocks, expected the first {count}",
        )
        self._capture(given, leased)

    async def stored(self, given: Arguments) -> None:
        """`stored: {at: a, blocks: $p, count: n}`: lease, read, compare, release."""
        ticket = self.context.name("read")
        await self.lease({**given, "ticket": ticket, "as": "_leased"})
        await self.read({"from": self.known["_leased"], "blocks": given["blocks"]})
        await self._caller(given).send({"type": "release_lease", "ticket": ticket})

    async def write(self, given: Arguments) -> None:
        """`write: {blocks: $p, to: $reserved, status: 0}`."""
        chain: BlockChain = given["blocks"]
        answer = given["to"]
        bodies = dict(zip(chain.hashes, chain.bodies, strict=True))
        parts = [(place[1], bodies[place[0]]) for place in answer["places"]]
        if not parts:
            return
        region = given.get("region") or answer["region"]
        connection = await self.context.dial(region)
        try:
            statuses = await connection.write_bytes(region, parts)
        except HungUp:
            raise CheckFailed("hung up on a write") from None
        finally:
            await connection.close()
        wanted = given.get("status", 0)
        if wrong := difference([wanted] * len(parts), statuses, "status"):
            raise CheckFailed(f"a write of blocks: {wrong}")

    async def read(self, given: Arguments) -> None:
        """`read: {from: $leased, blocks: $p, status: 0, sums: true}`: compare with the blocks."""
        chain: BlockChain = given["blocks"]
        answer = given["from"]
        parts = [(place[1], len(chain.bodies[0])) for place in answer["places"]]
        if not parts:
            return
        region = given.get("region") or answer["region"]
        connection = await self.context.dial(region)
        try:
            found = await connection.read_bytes(region, parts)
        except HungUp:
            raise CheckFailed("hung up on a read") from None
        finally:
            await connection.close()
        wanted = given.get("status", 0)
        statuses = [status for status, _ in found]
        if wrong := difference([wanted] * len(parts), statuses, "status"):
            raise CheckFailed(f"a read of blocks: {wrong}")
        if wanted != 0:
            return
        bodies = dict(zip(chain.hashes, zip(chain.bodies, chain.checksums, strict=True)))  # noqa: B905
        for place, (_, data) in zip(answer["places"], found, strict=True):
            body, checksum = bodies[place[0]]
            require(data == body, "the bytes of a block are not those that were put")
            if not given.get("sums", True):
                continue
            require(
                len(place) > 2 and place[2] == checksum,
                f"a place has the checksum {place[2:]}; the xxh3-64 of what was put is {checksum}",
            )

    async def read_refused(self, given: Arguments) -> None:
        """`read_refused: {from: $leased, blocks: $p}`: by the hello, or slice by slice."""
        try:
            await self.read({**given, "status": {"$one_of": [2, 3, 11]}})
        except CheckFailed as failed:
            if not str(failed).startswith("refused the hello"):
                raise

    async def require_ticket_keys(self, _: Arguments) -> None:
        """`require_ticket_keys: {}`: skip unless two leases have different keys."""
        caller = await self.context.connect()
        self._callers["_keys"] = caller
        chain = make_chain(self.context.chance, self.context.layout, 1)
        await self.put({"at": "_keys", "blocks": chain})
        keys = []
        for ticket in (self.context.name("key"), self.context.name("key")):
            await caller.send(lease_message(ticket, chain))
            pattern = {"type": {"$one_of": ["blocks_leased"]}, "ticket": ticket}
            keys.append((await caller.expect(pattern))["region"]["key"])
        if keys[0] == keys[1]:
            raise CheckSkipped("its regions have no keys for one ticket alone")

    # -- the subject ---------------------------------------------------------------------------

    async def kill(self, _: Arguments) -> None:
        """`kill: {}`: as a crash would."""
        await self.context.subject.kill()

    async def restart(self, _: Arguments) -> None:
        """`restart: {}`: start it again; `$record` is its new record."""
        await self.context.subject.restart()
        self.known["record"] = self.context.subject.record

    async def wait_s(self, given: Any) -> None:
        """`wait_s: 10` or `{share: 0.6, of: 10}`: let a deadline of the protocol pass.

        A whole one passes with half a second more.
        """
        if isinstance(given, dict):
            await asyncio.sleep(given["share"] * given["of"])
        else:
            await asyncio.sleep(float(given) + 0.5)

    async def eventually(self, steps: list[Arguments]) -> None:
        """`eventually: [steps]`: again and again until all pass; `$try` differs each time."""

        async def passed() -> bool:
            self.known["try"] = self.context.name("try")
            try:
                for step in steps:
                    await self.perform(step)
            except CheckFailed as failed:
                last.append(str(failed))
                return False
            return True

        last: list[str] = []
        try:
            await self.context.until(passed, "a condition")
        except CheckFailed as failed:
            raise CheckFailed(f"{failed}; the last time: {last[-1] if last else ''}") from None

    async def require_record(self, given: Arguments) -> None:
        """`require_record: pattern`: skip the case unless the subject's record matches."""
        if wrong := difference(given, self.context.subject.record):
            raise CheckSkipped(f"its record: {wrong}")

    def _caller(self, given: Arguments) -> Caller:
        name = given["at"]
        if name not in self._callers:
            raise CaseError(f"no connection {name!r}")
        return self._callers[name]

    def _capture(self, given: Arguments, value: Any) -> None:
        if "as" in given:
            self.known[given["as"]] = value


def reserve_message(ticket: str, chain: BlockChain, tenant: str = "") -> Arguments:
    """Return the message that reserves room for these blocks."""
    message = {
        "type": "reserve_blocks",
        "ticket": ticket,
        "layout": chain.layout,
        "hashes": chain.hashes,
        "parent": chain.parent,
        "token_ids": chain.token_ids,
    }
    return {**message, "tenant": tenant} if tenant else message


def lease_message(ticket: str, chain: BlockChain) -> Arguments:
    """Return the message that leases these blocks."""
    return {
        "type": "lease_blocks",
        "ticket": ticket,
        "layout": chain.layout,
        "hashes": chain.hashes,
    }


STEPS: dict[str, Callable[[CaseRun, Any], Awaitable[None]]] = {
    "connect": CaseRun.connect,
    "close": CaseRun.close,
    "listen": CaseRun.listen,
    "send": CaseRun.send,
    "send_frames": CaseRun.send_frames,
    "expect": CaseRun.expect,
    "expect_none": CaseRun.expect_none,
    "expect_event": CaseRun.expect_event,
    "expect_load": CaseRun.expect_load,
    "expect_stored": CaseRun.expect_stored,
    "match_sequences": CaseRun.match_sequences,
    "match": CaseRun.match,
    "blocks": CaseRun.blocks,
    "chain": CaseRun.chain,
    "ensure_layout": CaseRun.ensure_layout,
    "put": CaseRun.put,
    "lease": CaseRun.lease,
    "stored": CaseRun.stored,
    "write": CaseRun.write,
    "read": CaseRun.read,
    "read_refused": CaseRun.read_refused,
    "require_ticket_keys": CaseRun.require_ticket_keys,
    "kill": CaseRun.kill,
    "restart": CaseRun.restart,
    "wait_s": CaseRun.wait_s,
    "eventually": CaseRun.eventually,
    "require_record": CaseRun.require_record,
}
