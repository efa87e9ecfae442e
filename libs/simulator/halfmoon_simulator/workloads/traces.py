"""Requests as traces write them: one JSON object a line, in the format Mooncake published.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, …]}

`timestamp` is in milliseconds from the trace's start. A hash id stands for one block of 512
tokens *and* all tokens before it, so equal ids mean equal prefixes; the last block may be
partial and has an id too. NVIDIA's aiperf adds `session_id` and `delay_ms`: a further turn of
a session then starts so long after the turn before it has ended, and needs no timestamp. Ours are
`priority`, a whole number: of those that wait the largest goes first; and `ttft_slo_s`, the
request's own limit of the time to first token in seconds.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

#: Tokens of one block in the published traces.
TRACE_BLOCK_TOKENS = 512
#: Ids are made into block hashes of 16 bytes.
MAX_ID = 1 << 128


class BadTrace(ValueError):
    """A trace that can't be used; the text names file, line, field and value."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a workload."""

    #: Seconds from the start; in a session's later turns seconds after the turn before ended.
    at_s: float
    n_input: int
    #: Tokens that the model answers. Known to the engine's model alone, never to the core.
    n_output: int
    #: Ids of the input's blocks, the last one perhaps partial.
    blocks: tuple[int, ...]
    #: The session whose earlier turn must be over first, if there is one.
    session: str | None = None
    #: Of those that wait the largest goes first.
    priority: int = 0
    #: Its own limit of the time to first token, in seconds; None: the run's.
    ttft_slo_s: float | None = None


def with_sessions(
    requests: Iterable[TraceRequest],
) -> Iterator[tuple[TraceRequest, str | None]]:
    """Pair each request with the session of which it is a later turn; its time is a pause then."""
    begun: set[str | None] = set()
    for request in requests:
        yield request, request.session if request.session in begun else None
        begun.add(request.session)


@dataclass(frozen=True, slots=True)
class KnownTrace:
    """A published file, recognised by its bytes."""

    name: str
    file_name: str
    #: SHA-256 of the file, or the id that git gives it as a blob.
    sha256: str | None = None
    git_blob: str | None = None


#: Files of github.com/kvcache-ai/Mooncake, FAST25-release.
KNOWN_TRACES = (
    KnownTrace(
        "conversation",
        "conversation_trace.jsonl",
        sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    ),
    KnownTrace(
        "synthetic",
        "synthetic_trace.jsonl",
        sha256="bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
    ),
    KnownTrace(
        "toolagent",
        "toolagent_trace.jsonl",
        git_blob="b765599d1e0828b37f68d481563c385d3c11de54",
    ),
    KnownTrace(
        "arxiv", "mooncake_trace.jsonl", git_blob="d68d1c6ce27b35a168edc235d36d0202d233f0f2"
    ),
)


def identify_trace(path: Path) -> KnownTrace | None:
    """Return the published trace that equals this file byte for byte, or None."""
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    git_blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return next(
        (known for known in KNOWN_TRACES if sha256 == known.sha256 or git_blob == known.git_blob),
        None,
    )


def describe_trace(path: Path) -> str:
    """Describe a file's identity in one line, for the head of a report."""
    if (known := identify_trace(path)) is not None:
        return f"{path.name}: the published {known.name} trace"
    if any(known.file_name == path.name for known in KNOWN_TRACES):
        return f"{path.name}: NOT the published file of this name (its hash differs)"
    return f"{path.name}: a trace of your own"


def read_trace(path: Path, *, block_tokens: int = TRACE_BLOCK_TOKENS) -> list[TraceRequest]:
    """Read all requests of a file, in its order.

    Args:
        path: JSON lines as above.
        block_tokens: tokens that one hash id stands for.

    Raises:
        BadTrace: the first line that is not as it should be.
        OSError: the file can't be read.
    """
    requests: list[TraceRequest] = []
    sessions: set[str] = set()
    last_at_s = 0.0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            request = _parse(line, f"{path.name} line {number}", block_tokens, sessions)
            if request.session is not None and request.session in sessions:
                requests.append(request)
                continue
            if request.at_s < last_at_s:
                _bad(
                    f"{path.name} line {number}",
                    "timestamp",
                    request.at_s * 1e3,
                    f"it is before the line above it ({last_at_s * 1e3:g} ms); sort the file",
                )
            last_at_s = request.at_s
            if request.session is not None:
                sessions.add(request.session)
            requests.append(request)
    if not requests:
        raise BadTrace(f"{path.name} holds no request")
    return requests


def _parse(line: bytes, where: str, block_tokens: int, sessions: set[str]) -> TraceRequest:
    try:
        row: Any = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise BadTrace(f"{where} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadTrace(f"{where} is {row!r}, not an object")
    n_input = _whole(row, "input_length", where, least=1)
    n_output = _whole(row, "output_length", where, least=1)
    session = row.get("session_id")
    if session is not None and not isinstance(session, str):
        _bad(where, "session_id", session, "it must be text")
    if session in sessions:
        at_ms = _number(row, "delay_ms", where, default=0.0)
    else:
        at_ms = _number(row, "timestamp", where)
    blocks = row.get("hash_ids")
    if not isinstance(blocks, list) or not all(_is_whole(block) for block in blocks):
        _bad(where, "hash_ids", blocks, "it must be a list of whole numbers from 0")
    n_blocks = -(-n_input // block_tokens)
    if len(blocks) != n_blocks:
        _bad(
            where,
            "hash_ids",
            f"{len(blocks)} ids",
            f"input_length {n_input} has {n_blocks} blocks of {block_tokens} tokens",
        )
    if max(blocks) >= MAX_ID:
        _bad(where, "hash_ids", max(blocks), f"ids are below {MAX_ID}")
    if len(set(blocks)) != len(blocks):
        _bad(where, "hash_ids", blocks, "an id stands for a whole prefix, none can come twice")
    priority = row.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool):
        _bad(where, "priority", priority, "it must be a whole number")
    limit_s = row.get("ttft_slo_s")
    if limit_s is not None and _number(row, "ttft_slo_s", where) == 0:
        _bad(where, "ttft_slo_s", limit_s, "it must be more than 0 seconds")
    return TraceRequest(at_ms / 1e3, n_input, n_output, tuple(blocks), session, priority, limit_s)


def _whole(row: dict[str, Any], field: str, where: str, *, least: int) -> int:
    value = row.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _bad(where, field, value, f"it must be a whole number from {least}")
    return value


def _number(row: dict[str, Any], field: str, where: str, default: float | None = None) -> float:
    value = row.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        _bad(where, field, value, "it must be milliseconds from 0")
    return float(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _bad(where: str, field: str, value: object, why: str) -> NoReturn:
    shown = repr(value)
    raise BadTrace(f"{where}: {field} is {shown[:80]}{'…' * (len(shown) > 80)}: {why}")


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Summarise a workload, for the head of a report."""

    n_requests: int
    duration_s: float
    mean_input: float
    mean_output: float
    #: Share of block references whose block was referenced before.
    reuse: float


def trace_statistics(requests: Sequence[TraceRequest]) -> TraceStatistics:
    """Counts and means of a workload."""
    seen: set[int] = set()
    references = 0
    for request in requests:
        references += len(request.blocks)
        seen.update(request.blocks)
    n = len(requests)
    return TraceStatistics(
        n_requests=n,
        duration_s=max((r.at_s for r in requests if r.session is None), default=0.0),
        mean_input=sum(r.n_input for r in requests) / n,
        mean_output=sum(r.n_output for r in requests) / n,
        reuse=1 - len(seen) / references if references else 0.0,
    )
