"""Profile an engine on this machine: `python -m halfmoon_engine.profile MODEL`.

Times forwards of a real engine over a pool of its own: prefill over the tokens of a prompt and
how many of them are cached, decode over requests and their context. Prints one JSON object;
the caller fits its own formulas to the points. `halfmoon profile` runs this in a process.
"""

import argparse
import sys
from collections.abc import Sequence

import msgspec

from halfmoon_engine.forward_timing import least_forward_s
from halfmoon_engine.interface import Draw, Engine, Run
from halfmoon_engine.load import open_engine
from halfmoon_models.errors import ModelError
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.sampling import Sampling

#: Prompt tokens, and shares of them that are cached.
PREFILL_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
CACHED_SHARES = (0.0, 0.5, 0.9)
#: Requests in a step, and context tokens of each.
DECODE_REQUESTS = (1, 2, 4, 8, 16, 32)
DECODE_CONTEXT = (64, 256, 1024, 2048)
#: Exit status where the model is refused: the last line of the standard error says why.
REFUSED = 3
_REPEATS = 5
#: Shapes that take longer than this once are not repeated, and no larger ones are tried.
_LONG_S = 3.0
_GREEDY = Draw(Sampling(temperature=0.0))


class PrefillPoint(msgspec.Struct, frozen=True):
    """Time of a prompt of `n_tokens`, of which `n_cached` were cached."""

    n_tokens: int
    n_cached: int
    seconds: float


class DecodePoint(msgspec.Struct, frozen=True):
    """Time of a decode step over so many requests with so much context in all."""

    n_requests: int
    context_tokens: int
    seconds: float


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one engine."""

    name: str
    layout: KvLayout
    max_context: int
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]


def profile(engine: Engine, *, pool_mib: int = 256) -> EngineProfile:
    """Time forwards of growing size, over any content of the pool.

    Args:
        engine: without a pool.
        pool_mib: memory for the pool; shapes that need more are left out.
    """
    layout = engine.layout
    n_pages = max(1, pool_mib * 1024 * 1024 // layout.block_bytes)
    engine.attach(memoryview(bytearray(n_pages * layout.block_bytes)))
    try:
        prefill = tuple(_prefills(engine, n_pages))
        decode = tuple(_decodes(engine, n_pages))
    finally:
        engine.detach()
    return EngineProfile(
        name=engine.name,
        layout=layout,
        max_context=engine.max_context,
        prefill=prefill,
        decode=decode,
    )


def _prefills(engine: Engine, n_pages: int) -> list[PrefillPoint]:
    points: list[PrefillPoint] = []
    size = engine.layout.block_size
    for n in PREFILL_TOKENS:
        if n > engine.max_context or engine.layout.blocks_for(n) > n_pages:
            break
        for n_cached in sorted({int(n * share) // size * size for share in CACHED_SHARES}):
            pages = range(engine.layout.blocks_for(n))
            run = Run([1] * (n - n_cached), n_cached, pages, _GREEDY)
            points.append(PrefillPoint(n, n_cached, _timed(engine, [run])))
        if points[-1].seconds > _LONG_S or max(p.seconds for p in points) > _LONG_S:
            break
    return points


def _decodes(engine: Engine, n_pages: int) -> list[DecodePoint]:
    points: list[DecodePoint] = []
    for context in DECODE_CONTEXT:
        pages = engine.layout.blocks_for(context)
        for n in DECODE_REQUESTS:
            if context > engine.max_context or n * pages > n_pages:
                break
            runs = [
                Run([1], context - 1, range(i * pages, (i + 1) * pages), _GREEDY, continues=True)
                for i in range(n)
            ]
            points.append(DecodePoint(n, n * context, _timed(engine, runs)))
    return points


def _timed(engine: Engine, runs: Sequence[Run]) -> float:
    return least_forward_s(engine, runs, repeats=_REPEATS, long_s=_LONG_S)


def main(arguments: list[str]) -> None:
    """Profile the engine that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m halfmoon_engine.profile")
    parser.add_argument("model", help="folder, hub id, or fake://…")
    parser.add_argument("--block-size", type=int, default=64, help="tokens per page")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    parser.add_argument("--pool-mib", type=int, default=256, help="memory for the pool")
    options = parser.parse_args(arguments)
    try:
        engine = open_engine(
            options.model, block_size=options.block_size, threads=options.threads or None
        )
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(REFUSED) from None
    found = profile(engine, pool_mib=options.pool_mib)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
