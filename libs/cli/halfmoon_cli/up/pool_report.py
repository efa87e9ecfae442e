"""Say how many tokens the pools of a cluster's workers hold, and what to do where they are few."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

_MIB = 1 << 20


class _Pool(msgspec.Struct, frozen=True):
    """Hold what a worker's progress record says of its pool."""

    tokens: Annotated[int, msgspec.Meta(gt=0)] = msgspec.field(name="kv_tokens")
    longest: Annotated[int, msgspec.Meta(gt=0)] = msgspec.field(name="max_context")
    token_bytes: Annotated[int, msgspec.Meta(gt=0)]
    dtype: str = ""


def pool_lines(statuses: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[list[str], list[str]]:
    """Return a line for each role, and a warning for each that can't hold one longest request.

    Args:
        statuses: role and progress record of each process; records without a pool are left out.
    """
    pools: dict[str, list[_Pool]] = {}
    for role, record in statuses:
        try:
            pool = msgspec.convert(record, _Pool)
        except msgspec.ValidationError:
            continue
        pools.setdefault(role, []).append(pool)
    lines = [_line(role, found) for role, found in pools.items()]
    crowded = [role for role, found in pools.items() if len(found) > 1]
    small = [role for role, found in pools.items() if _largest(found) < _longest(found)]
    return lines, [_warning(role, pools[role], crowded) for role in small]


def _longest(pools: Iterable[_Pool]) -> int:
    return max(pool.longest for pool in pools)


def _largest(pools: Iterable[_Pool]) -> int:
    return max(pool.tokens for pool in pools)


def _line(role: str, pools: list[_Pool]) -> str:
    least, most = min(pool.tokens for pool in pools), _largest(pools)
    tokens = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    workers = f"{len(pools)} worker{'s' if len(pools) > 1 else ''}"
    longest = min(most, _longest(pools))
    return f"{role}: {workers} × {tokens} tokens; longest request {longest:,}"


def _warning(role: str, pools: list[_Pool], crowded: list[str]) -> str:
    longest, largest = _longest(pools), max(pools, key=lambda pool: pool.tokens)
    needed = -(-longest * largest.token_bytes // _MIB)
    ways = [f"more memory for its pages, where there is some (-o {role}.pool-mib={needed})"]
    if crowded:
        ways.insert(0, f"fewer workers ({' '.join(f'--{name} 1' for name in crowded)})")
    if largest.dtype == "float32":
        half = "-o prefill.dtype=bfloat16 -o decode.dtype=bfloat16"
        ways.append(f"half the bytes for each token ({half})")
    return (
        f"a {role} worker holds {largest.tokens:,} tokens, and the model's context is {longest:,}:"
        f" longer requests are refused. What helps: {', '.join(ways)}"
    )
