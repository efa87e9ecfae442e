"""Measure how fast KV events are decoded and taken into the index, on one processor core.

Blocks have 512 tokens. An event of a put has 64 blocks, a prompt of 32k tokens; moves between a
kvstore's tiers are events of one block each. The index follows one kvstore, or the last of 10,000.
Events of a stock server are translated too: its blocks are named by their tokens. Seconds are those
of the CPU, so other programs on the machine do not count; the best of several rounds is shown.
"""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.kv_events import (
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
    decode_payload,
    encode_payload,
)
from halfmoon_protocol.messages import BlocksSnapshot
from halfmoon_scheduling.directory.kv_event_follower import KvEventFollower
from halfmoon_scheduling.directory.prefix_index import PrefixIndex
from halfmoon_servers.kv_events.block_translator import BlockTranslator
from halfmoon_servers.kv_events.payload_decoder import decode_server_payload
from halfmoon_servers.kv_events.server_salts import ServerSalts

BLOCK_SIZE, N_BLOCKS = 512, 64
#: Blocks of one round, and rounds.
N_OF_ROUND, N_ROUNDS = 16_384, 7
N_KVSTORES = 10_000
#: Token ids are below this, as large vocabularies have them.
VOCABULARY = 128_000


def run(console: Console) -> None:
    """Measure events of kvstores, then events of stock servers."""
    dice = random.Random(1)
    table = Table(title=f"KV events, blocks of {BLOCK_SIZE} tokens, one core, blocks/s", box=None)
    table.add_column("events of a kvstore", no_wrap=True)
    columns = ("bytes per block", "decoded", "indexed", f"indexed, {N_KVSTORES:,} kvstores")
    for column in columns:
        table.add_column(column, justify="right")
    for name, make in (
        ("puts, without tokens", lambda: [_put(dice, with_tokens=False)]),
        ("puts, with tokens", lambda: [_put(dice, with_tokens=True)]),
        ("moves between tiers", lambda: _moves(dice)),
    ):
        batches = _batches(make)
        n_blocks = sum(_n_stored(events) for events in batches)
        payloads = [encode_payload(events, 1.0) for events in batches]
        shown = [_rate(n_blocks, lambda p=payloads: _decode(p))]  # type: ignore[misc]
        for n_kvstores in (1, N_KVSTORES):
            seconds = [_indexing_s(dice, payloads, n_kvstores) for _ in range(N_ROUNDS)]
            shown.append(n_blocks / min(seconds))
        n_bytes = sum(map(len, payloads)) / n_blocks
        table.add_row(name, f"{n_bytes:,.0f}", *(f"{rate:,.0f}" for rate in shown))
    console.print(table)
    _run_servers(console, dice)


def _run_servers(console: Console, dice: random.Random) -> None:
    table = Table(title="KV events of a stock server, one core", box=None)
    table.add_column("tokens per block, form of an event", no_wrap=True)
    for column in ("decoded, blocks/s", "and translated", "tokens/s"):
        table.add_column(column, justify="right")
    for size, form in itertools.product((16, BLOCK_SIZE), ("map", "array")):
        n_blocks = N_BLOCKS * BLOCK_SIZE // size
        payloads = [_server_payload(dice, n_blocks, size, form) for _ in range(8)]
        n = n_blocks * len(payloads)
        decoded = _rate(n, lambda p=payloads: [decode_server_payload(each) for each in p])  # type: ignore[misc]
        seconds = [_translating_s(payloads, size) for _ in range(N_ROUNDS)]
        whole = n / min(seconds)
        table.add_row(f"{size}, {form}", f"{decoded:,.0f}", f"{whole:,.0f}", f"{whole * size:,.0f}")
    console.print(table)


# -- events ------------------------------------------------------------------------------------


def _batches(make: Callable[[], Sequence[KvEvent]]) -> list[Sequence[KvEvent]]:
    batches: list[Sequence[KvEvent]] = []
    n = 0
    while n < N_OF_ROUND:
        batches.append(make())
        n += _n_stored(batches[-1])
    return batches


def _put(dice: random.Random, *, with_tokens: bool) -> BlockStored:
    return BlockStored(
        block_hashes=_hashes(dice, N_BLOCKS),
        parent_block_hash=None,
        token_ids=_tokens(dice, N_BLOCKS * BLOCK_SIZE) if with_tokens else (),
        block_size=BLOCK_SIZE,
        medium="CPU",
    )


def _moves(dice: random.Random) -> list[KvEvent]:
    events: list[KvEvent] = []
    for block in _hashes(dice, 256):
        events.append(BlockRemoved(block_hashes=(block,), medium="CPU"))
        events.append(
            BlockStored(
                block_hashes=(block,),
                parent_block_hash=block,
                token_ids=(),
                block_size=BLOCK_SIZE,
                medium="STORAGE",
            )
        )
    return events


def _server_payload(dice: random.Random, n_blocks: int, size: int, form: str) -> bytes:
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [dice.randbytes(32) for _ in range(n_blocks)],
        "parent_block_hash": None,
        "token_ids": _tokens(dice, n_blocks * size),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
    }
    return msgspec.msgpack.encode([1.0, [event if form == "map" else [*event.values()]], 0])


def _hashes(dice: random.Random, n: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(dice.randbytes(16)) for _ in range(n))


def _tokens(dice: random.Random, n: int) -> tuple[int, ...]:
    return tuple(dice.randrange(VOCABULARY) for _ in range(n))


def _n_stored(events: Sequence[KvEvent]) -> int:
    return sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))


# -- measurements --------------------------------------------------------------------------------


def _decode(payloads: list[bytes]) -> list[KvEventBatch]:
    return [decode_payload(payload, i) for i, payload in enumerate(payloads)]


def _rate(n_blocks: int, action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(N_ROUNDS):
        began = time.thread_time()
        action()
        seconds.append(time.thread_time() - began)
    return n_blocks / min(seconds)


def _indexing_s(dice: random.Random, payloads: list[bytes], n_kvstores: int) -> float:
    """Seconds of decoding payloads, and of taking them into an index that has other kvstores."""
    index = PrefixIndex()
    follower = KvEventFollower(index)
    kvstores = [WorkerId(f"kvstore-{i}") for i in range(n_kvstores)]
    for kvstore in kvstores:
        follower.on_joined(kvstore, 0.0)
        follower.on_snapshot(kvstore, BlocksSnapshot(sequence=-1, hashes=_hashes(dice, 1)), 0.0)
    began = time.thread_time()
    for i, payload in enumerate(payloads):
        follower.on_events(kvstores[-1], decode_payload(payload, i), 0.0)
    return time.thread_time() - began


def _translating_s(payloads: list[bytes], size: int) -> float:
    """Seconds of decoding a server's payloads, and of naming the blocks as Halfmoon does."""
    translator = BlockTranslator("bench", size, ServerSalts())
    began = time.thread_time()
    for payload in payloads:
        translator.translate(decode_server_payload(payload).events)
    return time.thread_time() - began


if __name__ == "__main__":
    run(Console(width=120))
