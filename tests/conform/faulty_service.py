"""Start a service of ours with one planted fault: `python faulty_service.py MODULE [FLAG …]`.

The fault is the JSON in the file that HALFMOON_PLANTED_FAULT names. It is read again for each
frame, so that one process has one fault after the other; an empty file is none.
`planted_faults.yaml` describes what a fault may say.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from halfmoon_conform.pattern_matcher import difference
from halfmoon_runtime import membership
from halfmoon_runtime.channels import socket_pump, zmq_curve
from halfmoon_scheduling.cache import block_cache
from halfmoon_scheduling.cluster import cluster_state
from halfmoon_transfer import cluster_key, grant_lender
from halfmoon_transfer.backends.tcp import record_keys, tcp_frames, tcp_server
from halfmoon_transfer.backends.tcp.tcp_sessions import TcpSessions
from halfmoon_transfer.cluster_key import ProverRole
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.metadata import descriptor
from halfmoon_transfer.regions import region_table
from halfmoon_transfer.regions.access import AccessStatus
from halfmoon_transfer.regions.grant_revocation import OVER

_FILE = Path(os.environ["HALFMOON_PLANTED_FAULT"])
_seen: dict[str, Any] = {"text": None, "fault": {}, "counts": {}, "deaf": set()}


def fault() -> dict[str, Any]:
    """Return the fault of the moment."""
    text = _FILE.read_text() if _FILE.exists() else ""
    if text != _seen["text"]:
        planted = msgspec.json.decode(text) if text else {}
        _seen.update(text=text, fault=planted, counts={}, deaf=set())
    found: dict[str, Any] = _seen["fault"]
    return found


def is_patched(name: str) -> bool:
    """Return whether a patch of this name is wanted now."""
    return bool(fault().get("patch") == name)


def plant() -> None:
    """Wrap the places at which faults act."""
    _wrap_messages()
    _wrap_decisions()
    _wrap_transfers()
    _wrap_membership()


# -- messages --------------------------------------------------------------------------------------


def _decoded(frame: Any) -> dict[str, Any] | None:
    data = bytes(frame)
    if data[:1] != b"\x01":
        return None
    try:
        found = msgspec.msgpack.decode(data[1:])
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("type"), str) else None


def _encoded(message: dict[str, Any]) -> bytes:
    return b"\x01" + msgspec.msgpack.encode(message)


def _rule(way: str, message: dict[str, Any] | None) -> dict[str, Any] | None:
    rule: dict[str, Any] | None = fault().get(way)
    if rule is None:
        return None
    if message is None:
        return rule if rule.get("raw") else None
    if rule.get("raw") or difference(rule.get("match", {}), message):
        return None
    counts = _seen["counts"]
    counts[way] = counts.get(way, 0) + 1
    late = counts[way] > rule.get("after", 0)
    return rule if late and counts[way] <= rule.get("until", 10**9) else None


def _changed(message: dict[str, Any], rule: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    for path, value in rule.get("set", {}).items():
        *way, last = path.split(".")
        place: Any = changed
        for step in way:
            place = place[int(step)] if step.lstrip("-").isdigit() else place[step]
        key: Any = int(last) if isinstance(place, list) else last
        old = place[key] if isinstance(place, list) else place.get(key)
        place[key] = _value(value, old, message)
    return changed


def _value(value: Any, old: Any, message: dict[str, Any]) -> Any:
    match value:
        case {"$add": n}:
            return (old or 0) + n
        case {"$cut": n}:
            return old[:-n]
        case {"$reverse": _}:
            return old[::-1]
        case {"$copy": path}:
            found: Any = message
            for step in path.split("."):
                found = found[int(step)] if isinstance(found, list) else found[step]
            return found
    return value


def _wrap_messages() -> None:
    send_now, start = socket_pump.SocketPump.send_now, socket_pump.SocketPump.start

    def faulty_send(self: Any, *frames: bytes) -> None:
        if len(frames) == 3 and frames[0].startswith(b"kv@"):
            frames = _faulty_events(frames)
        message = _decoded(frames[-1])
        rule = None if message is None else _rule("out", message)
        if rule is None or message is None or not frames:
            if frames:
                send_now(self, *frames)
            return
        if rule.get("drop"):
            return
        sent = _encoded(_changed(message, rule))
        for _ in range(rule.get("repeat", 1)):
            send_now(self, *frames[:-1], sent)

    def faulty_start(self: Any, take: Any, **more: Any) -> None:
        def faulty_take(frames: Any) -> None:
            _take(self, take, frames, send_now)

        start(self, faulty_take, **more)

    socket_pump.SocketPump.send_now = faulty_send  # type: ignore[method-assign]
    socket_pump.SocketPump.start = faulty_start  # type: ignore[method-assign]


def _take(pump: Any, take: Any, frames: Any, send_now: Any) -> None:
    peer = bytes(frames[0]) if len(frames) > 1 else b""
    if peer and peer in _seen["deaf"] and fault():
        return
    parts = frames[1:] if len(frames) > 1 else frames
    message = _decoded(parts[-1]) if len(parts) == 1 else None
    if message is None and len(parts) == 1 and len(frames) == 1:
        take(frames)  # of a monitor or a publisher
        return
    rule = _rule("into", message)
    if rule is None:
        take(frames)
        return
    if rule.get("deaf"):
        _seen["deaf"].add(peer)
        return
    if answer := rule.get("answer"):
        answer = _changed({**answer}, {"set": {}})
        filled = {k: _value(v, None, message or {}) for k, v in answer.items()}
        if "worker" in answer:
            filled["worker"] = {}
        send_now(pump, *frames[:-1][:1], _encoded(filled))
    if rule.get("drop") or (rule.get("answer") and not rule.get("go_on")):
        return
    if message is not None:
        frames = [*frames[:-1], _encoded(_changed(message, rule))]
    for _ in range(rule.get("repeat", 1)):
        take(frames)


def _faulty_events(frames: tuple[bytes, ...]) -> tuple[bytes, ...]:
    rule = fault().get("events")
    if rule is None:
        return frames
    payload = msgspec.msgpack.decode(frames[2])
    payload[1] = [
        _changed(event, rule)
        for event in payload[1]
        if difference(rule.get("match", {}), event) or not rule.get("drop")
    ]
    if rule.get("drop") and not payload[1]:
        return ()
    number = int.from_bytes(frames[1], "big") + rule.get("number", 0)
    return frames[0], number.to_bytes(8, "big"), msgspec.msgpack.encode(payload)


# -- patches ---------------------------------------------------------------------------------------


def _patch(owner: Any, name: str, patch: str, instead: Callable[..., Any]) -> None:
    """Call `instead` in place of a function while a patch is wanted, with the function first."""
    real = getattr(owner, name)

    def faulty(*given: Any, **more: Any) -> Any:
        return instead(real, *given, **more) if is_patched(patch) else real(*given, **more)

    setattr(owner, name, faulty)


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _nothing(*_: Any) -> None:
    pass


def _fail(*_: Any) -> None:
    raise OSError("planted")


def _wrap_transfers() -> None:
    encode_reply, encode_hello = tcp_frames.encode_reply, tcp_frames.encode_hello

    def faulty_reply(op: int, number: int, slices: Any) -> bytes:
        rule = fault().get("reply")
        if rule is None or op not in rule.get("ops", (1, 2, 3)):
            return encode_reply(op, number, slices)
        if rule.get("hang_up"):
            raise OSError("planted")
        chosen = rule.get("status", {})
        changed = [
            tcp_frames.SliceReply(
                AccessStatus(chosen.get(str(int(each.status)), int(each.status))),
                rule.get("detail", each.detail),
            )
            for each in slices
        ]
        return encode_reply(op, number + rule.get("number", 0), changed)

    def faulty_hello(hello: Any) -> bytes:
        rule = fault().get("hello")
        if rule is not None:
            hello = msgspec.structs.replace(hello, **rule)
        if is_patched("same-nonces") and hello.nonce:
            hello = msgspec.structs.replace(hello, nonce=bytes(32))
        return encode_hello(hello)

    tcp_frames.encode_reply = faulty_reply
    tcp_frames.encode_hello = faulty_hello
    _patch(tcp_frames, "encode_failure", "silent-failures", lambda encode, _: encode(""))
    _wrap_owner()


def _wrap_owner() -> None:
    connection: Any = tcp_server._Connection
    examine = connection._examine

    def lenient_proof(self: Any, key: Any, hello: Any, *maps: bytes) -> Any:
        proven, verdict = examine(self, key, hello, *maps)
        if proven is None and is_patched("any-proof"):
            ours = key.prove(ProverRole.OWNER, *maps)
            return key, tcp_frames.TcpProof(ours, "")
        return proven, verdict

    def grant_all(grant: Any, self: Any, region: Any, _ranges: Any, _op: Any, ttl_s: float) -> Any:
        return grant(self, region, [(0, region.length)], "both", ttl_s)

    def agree_alone(agree: Any, self: Any, key: Any, _share: bytes, *maps: bytes) -> Any:
        return agree(self, key, self.share, *maps)

    connection._examine = lenient_proof
    _patch(connection, "_why_refused", "no-refusal", lambda *_: "")
    _patch(connection, "_greet", "one-connection", _fail)
    _patch(record_keys.KeyExchange, "agree", "any-share", agree_alone)
    _patch(TcpSessions, "end", "nothing-is-over", _yes)
    _patch(region_table.RegionTable, "grant", "keys-for-all", grant_all)
    _patch(TransferEngine, "begin_revoke", "keys-stay", lambda *_: OVER)


def _wrap_membership() -> None:
    made: Any = membership.Membership
    curve, write, readable = zmq_curve.Curve, made._write_now, membership._readable

    def faulty_write(self: Any) -> None:
        if is_patched("no-renewal") and self._renewed_s is not None:
            return
        if is_patched("record-for-ever"):
            self._ttl_s = 600.0
        if is_patched("takes-any-record"):
            self._store.put(self._key, msgspec.json.encode(self._info), ttl_s=self._ttl_s)
            return
        if rule := fault().get("record"):
            value = {**msgspec.to_builtins(self._info), **rule}
            self._store.put(self._key, msgspec.json.encode(value), ttl_s=self._ttl_s)
            return
        write(self)

    def answer_any(answer: Any, self: Any, frames: Any) -> None:
        answer(self, [*frames[:8], self._allowed])

    def first_starts(records: Any, seen: Any) -> Any:
        members, now_seen = readable(records, seen)
        if is_patched("first-starts-only"):
            members = {name: info for name, info in members.items() if info.generation == 1}
        return members, now_seen

    def without_tcp(encode: Any, described: Any) -> Any:
        return encode(msgspec.structs.replace(described, endpoints={}))

    if is_patched("members-alone"):
        membership.SEGMENTS = "nowhere/"
    made._write_now = faulty_write
    watched: Any = membership
    watched._readable = first_starts
    _patch(made, "_remove_now", "record-stays", _nothing)
    _patch(curve, "_answer", "any-caller", answer_any)
    _patch(curve, "serve", "no-curve", _nothing)
    _patch(curve, "knows", "any-key-id", _yes)
    _patch(curve, "call", "any-key-id", lambda call, self, socket, _: call(self, socket, ""))
    _patch(descriptor, "encode", "no-tcp", without_tcp)


def _wrap_decisions() -> None:
    cluster: Any = cluster_state.Cluster
    foreign = cluster.foreign_kvstores

    def no_foreign(self: Any) -> Any:
        return frozenset() if is_patched("any-layout") else foreign.fget(self)

    def newest(choose: Any, stored: Any, n: int, *, keep: Any, **more: Any) -> Any:
        return choose(stored, len(stored), keep=keep, **more)[::-1][:n]

    def any_parent(choose: Any, stored: Any, n: int, *, keep: Any, **more: Any) -> Any:
        return choose(stored, n, keep=(), **more)

    cluster.foreign_kvstores = property(no_foreign)
    _patch(block_cache, "choose_victims", "newest-first", newest)
    _patch(block_cache, "choose_victims", "parent-goes", any_parent)
    _patch(cluster_key.ClusterKey, "accepts", "any-owner", _yes)
    _patch(grant_lender, "unkeyed", "keys-for-all", lambda _, region: region)


if __name__ == "__main__":
    module = sys.argv[1]
    plant()
    main = importlib.import_module(f"{module}.__main__").main
    sys.argv = [module, *sys.argv[2:]]
    main()
