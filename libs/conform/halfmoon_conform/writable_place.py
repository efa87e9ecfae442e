"""Get a place of the subject's memory to write to and read from, whatever its role."""

from dataclasses import dataclass
from typing import Any

from halfmoon_conform.blocks import block_bytes
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.decode_client import DecodeClient
from halfmoon_conform.peers.caller import Caller
from halfmoon_conform.peers.transfer_connection import RegionMap


@dataclass(frozen=True)
class WritablePlace:
    """A run of bytes that the subject holds for this check alone, until the check ends."""

    region: RegionMap
    offset: int
    length: int
    #: The connection that holds it, and the message that gives it back.
    holder: Caller
    give_back: dict[str, Any]

    async def end(self) -> None:
        """Give it back before the check ends."""
        await self.holder.send(self.give_back)
        await self.holder.settle()


async def open_place(context: CheckContext) -> WritablePlace:
    """Reserve a block at a kvstore, or a landing at a decode worker."""
    if context.subject.record["role"] == "kvstore":
        caller = await context.connect()
        name = context.name("place")
        chain = context.blocks(1)
        await caller.send(
            {
                "type": "reserve_blocks",
                "ticket": name,
                "layout": chain.layout,
                "hashes": chain.hashes,
                "parent": None,
                "token_ids": chain.token_ids,
            }
        )
        answer = await caller.expect({"type": "blocks_reserved", "ticket": name})
        revoke = {"type": "revoke_blocks", "ticket": name}
        length = len(chain.bodies[0])
        return WritablePlace(answer["region"], answer["places"][0][1], length, caller, revoke)
    layout = context.layout
    client = await DecodeClient.open(context)
    answer = await client.landing(layout["block_size"], 1)
    landing, size = answer["landing"], block_bytes(layout)
    cancel = {"type": "cancel", "request_id": answer["request_id"]}
    offset = landing["pages"][0] * size
    return WritablePlace(landing["region"], offset, size, client.caller, cancel)
