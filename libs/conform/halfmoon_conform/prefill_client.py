"""Play a conductor and a decode worker's memory to a prefill worker."""

import asyncio
from dataclasses import dataclass
from typing import Any

from halfmoon_conform.blocks import block_bytes
from halfmoon_conform.check_context import CheckContext
from halfmoon_conform.kv_compare import near
from halfmoon_conform.peers.caller import Caller
from halfmoon_conform.peers.played_owner import PlayedOwner
from halfmoon_conform.peers.wire_maps import WireMap
from halfmoon_conform.played_kvstore import PlayedKvstore
from halfmoon_conform.verdict import require
from halfmoon_protocol.blocks import block_hashes

#: Pages of a pool that the kit lets land in.
N_PAGES = 24
_UNTOUCHED = 0xA5
#: Token ids that any model has.
_MAX_TOKEN = 64


@dataclass(frozen=True)
class PlayedLanding:
    """A landing in the kit's memory."""

    region: WireMap
    pages: list[int]
    layout: dict[str, Any]

    def as_map(self) -> WireMap:
        """Return it as messages have it."""
        return {"region": self.region, "pages": self.pages, "layout": self.layout}


class PrefillClient:
    """Run prompts at the subject through one connection, into one segment of the kit's."""

    def __init__(self, context: CheckContext, caller: Caller, owner: PlayedOwner) -> None:
        self.context, self.caller, self.owner = context, caller, owner
        self.size = block_bytes(context.layout)
        self.block_size: int = context.layout["block_size"]

    @classmethod
    async def open(cls, context: CheckContext) -> "PrefillClient":
        """Connect, say hello, and open a segment to land in."""
        owner = PlayedOwner(context.name("decode"), context.subject.cluster_key)
        await owner.open(context.subject.store)
        context.on_end(owner.close)
        context.remove_on_end(f"halfmoon/segments/{owner.name}")
        return cls(context, await context.connect(), owner)

    def tokens(self, n_tokens: int) -> list[int]:
        """Return a random prompt."""
        return [self.context.chance.randrange(_MAX_TOKEN) for _ in range(n_tokens)]

    def hashes(self, tokens: list[int]) -> list[bytes]:
        """Return the hashes of a prompt's full blocks."""
        model = self.context.layout["model"]
        found = block_hashes(tokens, model=model, block_size=self.block_size)
        return [bytes(each) for each in found]

    def landing(self, n_tokens: int) -> PlayedLanding:
        """Set pages aside, in an order of chance."""
        region = self.owner.allocate(N_PAGES * self.size)
        n_pages = -(-n_tokens // self.block_size)
        pages = self.context.chance.sample(range(N_PAGES), n_pages)
        return PlayedLanding(region, pages, self.context.layout)

    async def start(
        self, tokens: list[int], landing: PlayedLanding, request_id: str = "", **more: Any
    ) -> str:
        """Ask for a prompt; `more` replaces fields. Return the request's id."""
        request_id = request_id or self.context.name("request")
        await self.caller.send(
            {
                "type": "start_prefill",
                "request_id": request_id,
                "token_ids": tokens,
                "n_prompt": len(tokens) or 1,
                "block_hashes": self.hashes(tokens),
                "landing": landing.as_map(),
                "landing_expires_s": 60.0,
                "sampling": {"temperature": 0.0},
                "stopping": {"max_new_tokens": 8},
                **more,
            }
        )
        return request_id

    async def end_of(self, request_id: str, within_s: float = 60.0) -> WireMap:
        """Wait for the message that ends a request."""
        return await self.caller.take(
            lambda m: m.get("request_id") == request_id, f"the end of {request_id}", within_s
        )

    async def run(self, tokens: list[int], **more: Any) -> tuple[WireMap, PlayedLanding]:
        """Run a prompt to its end, and see that it is done and wrote its pages alone."""
        landing = more.pop("into", None) or self.landing(len(tokens))
        request_id = await self.start(tokens, landing, **more)
        done = await self.end_of(request_id)
        require(done["type"] == "prefill_done", f"{done['type']}: {done.get('reason', '')}")
        require(not self.owner.faults, f"as a dialer it {'; '.join(self.owner.faults[:1])}")
        self.require_untouched(landing)
        return done, landing

    def memory(self, landing: PlayedLanding) -> bytearray:
        """Return the memory of a landing's region."""
        return self.owner.regions[landing.region["key"]]

    def page(self, landing: PlayedLanding, block: int) -> bytes:
        """Return the page of a landing's block."""
        start = landing.pages[block] * self.size
        return bytes(self.memory(landing)[start : start + self.size])

    def rows(self, landing: PlayedLanding, block: int, n_tokens: int) -> list[bytes]:
        """Return the keys and values of a block's first tokens, layer by layer."""
        layout = self.context.layout
        n_sides = 2 * layout["n_layers"]
        side = self.size // n_sides
        token = side // self.block_size
        page = self.page(landing, block)
        return [page[i * side : i * side + n_tokens * token] for i in range(n_sides)]

    def kv(self, landing: PlayedLanding, n_tokens: int) -> list[list[bytes]]:
        """Return the KV of a prompt that landed, without the rest of its last page."""
        size = self.block_size
        return [
            self.rows(landing, block, min(size, n_tokens - block * size))
            for block in range(-(-n_tokens // size))
        ]

    async def fill(self, kvstore: PlayedKvstore, tokens: list[int]) -> tuple[Any, PlayedLanding]:
        """Have the subject put a prompt's blocks into a kvstore, and return how it ended."""
        done, landing = await self.run(tokens, store_in=kvstore.port.address)
        hashes = self.hashes(tokens)

        async def stored() -> bool:
            return all(each in kvstore.stored for each in hashes)

        await self.context.until(stored, "the prompt's blocks are committed")
        for block, each in enumerate(hashes):
            require(
                kvstore.body(each) == self.page(landing, block), "stored other bytes than landed"
            )
        return done, landing

    def require_near(self, one: list[list[bytes]], other: list[list[bytes]], what: str) -> None:
        """See that two prompts have the same KV but for rounding."""
        require(near(one, other, self.context.layout["dtype"]), f"{what}: other KV")

    def require_untouched(self, landing: PlayedLanding) -> None:
        """See that nothing was written outside of a landing's pages."""
        memory = self.memory(landing)
        for page in set(range(N_PAGES)) - set(landing.pages):
            body = memory[page * self.size : (page + 1) * self.size]
            require(
                body.count(_UNTOUCHED) == len(body), f"wrote to page {page}, which is no page of it"
            )

    async def quiet(self, landing: PlayedLanding, for_s: float = 1.5) -> int:
        """Count the writes to a landing that come in the next seconds."""
        before = len(self.owner.writes(landing.region["key"]))
        await asyncio.sleep(for_s)
        return len(self.owner.writes(landing.region["key"])) - before
