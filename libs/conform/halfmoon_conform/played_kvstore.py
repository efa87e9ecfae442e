"""Play a kvstore to a subject that puts and reads blocks: it keeps what it is given."""

from dataclasses import dataclass
from typing import Any

import xxhash

from halfmoon_conform.blocks import block_bytes
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.peers.played_owner import PlayedOwner
from halfmoon_conform.peers.played_port import PlayedPort
from halfmoon_conform.peers.wire_maps import WireMap

_N_SLOTS = 64


@dataclass
class _Put:
    hashes: list[bytes]
    offsets: list[int]


class PlayedKvstore:
    """A kvstore of one region, which never evicts; faults are set by a check."""

    def __init__(self, context: CheckContext, port: PlayedPort, owner: PlayedOwner) -> None:
        self.port, self.owner = port, owner
        self._size = block_bytes(context.layout)
        self.region = owner.allocate(_N_SLOTS * self._size)
        self._n_used = 0
        #: Offset and checksum of each stored block.
        self.stored: dict[bytes, tuple[int, int]] = {}
        self._puts: dict[tuple[bytes, str], _Put] = {}
        self.reserved: list[WireMap] = []
        #: A lease is answered by this instead of what is stored; None: not at all.
        self.lease_answer: Any = "stored"
        self.silent = False
        #: Seconds that a reservation lasts unless it is renewed.
        self.reservation_s = 30.0
        port.handler = self._handle

    @classmethod
    async def open(cls, context: CheckContext, *, register: bool = True) -> "PlayedKvstore":
        """Open its sockets and its segment, and publish its records."""
        subject = context.subject
        name = context.name("kvstore")
        owner = PlayedOwner(name, subject.cluster_key)
        await owner.open(subject.store)
        context.on_end(owner.close)
        context.remove_on_end(f"halfmoon/segments/{name}")
        record = {"worker_id": name, "role": "kvstore", "layout": context.layout}
        port = PlayedPort(context.sockets, subject.cluster_key, record)
        context.on_end(port.close)
        if register:
            await port.register(subject.store)
            context.remove_on_end(f"halfmoon/members/{name}")
        return cls(context, port, owner)

    def body(self, block: bytes) -> bytes:
        """Return the bytes of a stored block."""
        offset, _ = self.stored[block]
        return bytes(self.owner.regions[self.region["key"]][offset : offset + self._size])

    def keep(self, block: bytes, body: bytes) -> None:
        """Store a block that nothing has put."""
        offset = self._next_offset()
        self.owner.regions[self.region["key"]][offset : offset + self._size] = body
        self.stored[block] = (offset, xxhash.xxh3_64_intdigest(body))

    def _next_offset(self) -> int:
        offset = self._n_used * self._size
        self._n_used = (self._n_used + 1) % _N_SLOTS
        return offset

    async def _handle(self, caller: bytes, message: WireMap) -> bool:
        if self.silent:
            return False
        match message["type"]:
            case "reserve_blocks":
                self.reserved.append(message)
                new = [each for each in message["hashes"] if each not in self.stored]
                put = _Put(new, [self._next_offset() for _ in new])
                self._puts[caller, message["ticket"]] = put
                places = [[each, at, 0] for each, at in zip(put.hashes, put.offsets, strict=True)]
                await self._reply(caller, message, "blocks_reserved", places, self.reservation_s)
            case "commit_blocks":
                put = self._puts.pop((caller, message["ticket"]))
                for each, at, total in zip(
                    put.hashes, put.offsets, message["checksums"], strict=True
                ):
                    self.stored[each] = (at, total)
                answer = {"type": "blocks_committed", "ticket": message["ticket"]}
                await self.port.send(caller, answer)
            case "lease_blocks":
                await self._on_lease(caller, message)
            case _:
                return False
        return False

    async def _on_lease(self, caller: bytes, message: WireMap) -> None:
        if self.lease_answer is None:
            return
        if self.lease_answer != "stored":
            await self.port.send(caller, {**self.lease_answer, "ticket": message["ticket"]})
            return
        places = []
        for each in message["hashes"]:
            if each not in self.stored:
                break
            offset, total = self.stored[each]
            places.append([each, offset, total])
        await self._reply(caller, message, "blocks_leased", places, 10.0)

    async def _reply(
        self, caller: bytes, message: WireMap, kind: str, places: list[Any], expires_s: float
    ) -> None:
        await self.port.send(
            caller,
            {
                "type": kind,
                "ticket": message["ticket"],
                "region": self.region,
                "places": places,
                "expires_s": expires_s,
            },
        )
