"""Start a service of ours with one planted fault: `python faulty_service.py MODULE [FLAG …]`.

The fault is the JSON in the file that HALFMOON_PLANTED_FAULT names. It is read again for each
frame, so that one process has one fault after the other; an empty file is none.
`planted_faults.yaml` describes what a fault may say.
"""

import importlib
import os
import sys
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
        case {"$flip": _}:
            return bytes([old[0] ^ 0xFF]) + old[1:]
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
    if rule.get("die"):
        os._exit(3)
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


# -- transfers -------------------------------------------------------------------------------------


def _wrap_transfers() -> None:
    encode_reply, encode_hello = tcp_frames.encode_reply, tcp_frames.encode_hello
    encode_failure = tcp_frames.encode_failure

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

    def faulty_failure(text: str) -> bytes:
        return encode_failure("" if is_patched("silent-failures") else text)

    tcp_frames.encode_reply = faulty_reply
    tcp_frames.encode_hello = faulty_hello
    tcp_frames.encode_failure = faulty_failure
    _wrap_owner()


def _wrap_owner() -> None:
    connection: Any = tcp_server._Connection
    why_refused, examine, greet = connection._why_refused, connection._examine, connection._greet
    end = TcpSessions.end
    grant = region_table.RegionTable.grant

    def lenient_refusal(self: Any, hello: Any) -> str:
        return "" if is_patched("no-refusal") else str(why_refused(self, hello))

    def lenient_proof(self: Any, key: Any, hello: Any, *maps: bytes) -> Any:
        proven, verdict = examine(self, key, hello, *maps)
        if proven is None and is_patched("any-proof"):
            ours = key.prove(ProverRole.OWNER, *maps)
            return key, tcp_frames.TcpProof(ours, "")
        return proven, verdict

    agree = record_keys.KeyExchange.agree

    def any_share(self: Any, key: Any, share: bytes, *maps: bytes) -> Any:
        given = self.share if is_patched("any-share") else share
        return agree(self, key, given, *maps)

    exchange: Any = record_keys.KeyExchange
    exchange.agree = any_share

    def slow_greeting(self: Any) -> bool:
        if is_patched("one-connection"):
            raise OSError("planted")
        return bool(greet(self))

    def lenient_end(self: Any, *given: Any) -> bool:
        return True if is_patched("nothing-is-over") else bool(end(self, *given))

    def whole_grant(self: Any, region: Any, ranges: Any, op: Any, ttl_s: float) -> Any:
        if is_patched("keys-for-all"):
            ranges, op = [(0, region.length)], "both"
        if is_patched("keys-for-ever"):
            ttl_s = 3600.0
        return grant(self, region, ranges, op, ttl_s)

    connection._why_refused, connection._examine = lenient_refusal, lenient_proof
    connection._greet = slow_greeting
    sessions: Any = TcpSessions
    sessions.end = lenient_end
    region_table.RegionTable.grant = whole_grant  # type: ignore[method-assign]
    begin_revoke = _engine_class().begin_revoke

    def lenient_revoke(self: Any, granted: Any) -> Any:
        return OVER if is_patched("keys-stay") else begin_revoke(self, granted)

    _engine_class().begin_revoke = lenient_revoke


def _engine_class() -> Any:
    from halfmoon_transfer.engine import TransferEngine

    return TransferEngine


# -- membership ------------------------------------------------------------------------------------


def _wrap_membership() -> None:
    made: Any = membership.Membership
    write, remove, curve = made._write_now, made._remove_now, zmq_curve.Curve
    answer, serve = curve._answer, curve.serve

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

    def faulty_remove(self: Any) -> None:
        if not is_patched("record-stays"):
            remove(self)

    def any_caller(self: Any, frames: Any) -> None:
        if is_patched("any-caller"):
            frames = [*frames[:8], self._allowed]
        answer(self, frames)

    def plain(self: Any, socket: Any) -> None:
        if not is_patched("no-curve"):
            serve(self, socket)

    readable, knows, call = membership._readable, curve.knows, curve.call

    def first_starts(records: Any, seen: Any) -> Any:
        members, now_seen = readable(records, seen)
        if is_patched("first-starts-only"):
            members = {name: info for name, info in members.items() if info.generation == 1}
        return members, now_seen

    def any_key(self: Any, key_id: str) -> bool:
        return True if is_patched("any-key-id") else bool(knows(self, key_id))

    def call_by_any(self: Any, socket: Any, key_id: str) -> None:
        call(self, socket, "" if is_patched("any-key-id") else key_id)

    encode = descriptor.encode

    def without_tcp(described: Any) -> bytes:
        if is_patched("no-tcp"):
            described = msgspec.structs.replace(described, endpoints={})
        return encode(described)

    records: Any = descriptor
    records.encode = without_tcp
    if is_patched("members-alone"):
        membership.SEGMENTS = "nowhere/"
    made._write_now, made._remove_now = faulty_write, faulty_remove
    watched: Any = membership
    watched._readable = first_starts
    changed: Any = curve
    changed._answer, changed.serve = any_caller, plain
    changed.knows, changed.call = any_key, call_by_any


# -- decisions -------------------------------------------------------------------------------------


def _wrap_decisions() -> None:
    cluster: Any = cluster_state.Cluster
    foreign, key = cluster.foreign_kvstores, cluster_key.ClusterKey
    accepts, unkeyed = key.accepts, grant_lender.unkeyed

    def no_foreign(self: Any) -> Any:
        return frozenset() if is_patched("any-layout") else foreign.fget(self)

    def any_proof(self: Any, *given: Any) -> bool:
        return True if is_patched("any-owner") else bool(accepts(self, *given))

    def keyed(region: Any) -> Any:
        return region if is_patched("keys-for-all") else unkeyed(region)

    cache: Any = block_cache
    choose = cache.choose_victims

    def choose_badly(stored: Any, n: int, *, keep: Any, **more: Any) -> Any:
        if is_patched("newest-first"):
            return choose(stored, len(stored), keep=keep, **more)[::-1][:n]
        return choose(stored, n, keep=() if is_patched("parent-goes") else keep, **more)

    cache.choose_victims = choose_badly
    cluster.foreign_kvstores = property(no_foreign)
    changed: Any = key
    changed.accepts = any_proof
    grant_lender.unkeyed = keyed


if __name__ == "__main__":
    module = sys.argv[1]
    plant()
    main = importlib.import_module(f"{module}.__main__").main
    sys.argv = [module, *sys.argv[2:]]
    main()
