"""Mooncake's records, as values: what is in its metadata store and goes over handshakes. Pure.

    mooncake/[<cluster>/]ram/<name>        the segment record: data port, version, buffers
    mooncake/[<cluster>/]rpc_meta/<name>   where the segment's handshake port is

Both are JSON. A segment whose name holds a "/" has its record at mooncake/[<cluster>/]<name>.
Fields that we don't know are ignored, as theirs ignores what we add to our own records:

    "halfmoon": {"segment": …, "generation": …, "epoch": …}        of the segment
    "halfmoon": {"key_hash": …, "read_only": …}                    of a buffer

By these two Halfmoon engines find each other's keyed regions at absolute addresses: a region's
key stays secret, its hash says which buffer it is. The epoch is a random number that changes
whenever a region is taken back; see `server`.
"""

import hashlib
from datetime import datetime

import msgspec

#: What stands for "no metadata server": segments are named by their handshake address.
P2P = "P2PHANDSHAKE"


class RecordError(ValueError):
    """A record that can't be read, or that we can't use."""


class HalfmoonBufferInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a Halfmoon engine says of a buffer beyond Mooncake's record."""

    key_hash: str
    read_only: bool = False


class BufferRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One registered buffer."""

    addr: int
    length: int
    #: Its location ("cpu:0", "*"); Mooncake's TCP segments hold the segment's name here.
    name: str = ""
    halfmoon: HalfmoonBufferInfo | None = None


class HalfmoonSegmentInfo(msgspec.Struct, frozen=True):
    """Which start of which Halfmoon segment it is."""

    segment: str
    generation: int
    #: Hexadecimal, as JSON numbers of 64 bits don't survive everywhere.
    epoch: str


class SegmentRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One process's segment."""

    name: str
    protocol: str
    tcp_data_port: int = 0
    #: Absent before Mooncake 0.3.13: then it is the host of the segment's handshake port.
    tcp_data_host: str = ""
    #: Absent before version 2.
    tcp_proto_version: int = 1
    timestamp: str = ""
    rdma_server_name: str = ""
    buffers: tuple[BufferRecord, ...] = ()
    halfmoon: HalfmoonSegmentInfo | None = None


class RpcRecord(msgspec.Struct, frozen=True):
    """Where a segment's handshake port is."""

    ip_or_host_name: str
    rpc_port: int


class MooncakeNotification(msgspec.Struct, frozen=True):
    """A small message: Mooncake's name for whom it is from (free text), and its text."""

    name: str
    notify_msg: str


def segment_key(name: str, cluster: str = "") -> str:
    """The metadata key of a segment record."""
    return f"{_prefix(cluster)}{name}" if "/" in name else f"{_prefix(cluster)}ram/{name}"


def rpc_key(name: str, cluster: str = "") -> str:
    """The metadata key of a handshake address."""
    return f"{_prefix(cluster)}rpc_meta/{name}"


def _prefix(cluster: str) -> str:
    return f"mooncake/{cluster}/" if cluster else "mooncake/"


def hash_key(key: bytes) -> str:
    """What is published of a region's key: enough to recognise it, nothing to derive it from."""
    return hashlib.sha256(b"halfmoon region " + key).hexdigest()[:32]


def format_timestamp(now: datetime) -> str:
    """A moment as Mooncake writes it."""
    return now.strftime("%Y-%m-%d %H:%M:%S.%f")


def encode(record: SegmentRecord | RpcRecord | MooncakeNotification) -> bytes:
    """JSON, with fields that Mooncake wants to see even when they hold defaults."""
    fields = msgspec.to_builtins(record)
    if isinstance(record, SegmentRecord):
        fields = {
            "tcp_data_port": 0,
            "timestamp": "",
            "rdma_server_name": "",
            "buffers": [],
            **fields,
        }
    return msgspec.json.encode(fields)


def decode_segment(value: bytes | memoryview) -> SegmentRecord:
    """A segment record that TCP can be spoken with.

    Raises:
        RecordError: it is no record, or of another transport, or says nothing sensible.
    """
    try:
        record = msgspec.json.decode(value, type=SegmentRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"not a Mooncake segment record: {error}") from None
    if record.protocol != "tcp":
        raise RecordError(
            f"segment {record.name:.200} speaks {record.protocol!r:.40}; only tcp is spoken here"
        )
    if not 0 < record.tcp_data_port < 65536:
        raise RecordError(f"segment {record.name:.200} has data port {record.tcp_data_port}")
    for each in record.buffers:
        if each.addr < 0 or each.length < 1 or each.addr + each.length > 2**64:
            raise RecordError(
                f"segment {record.name:.200} has a buffer of {each.length} bytes at {each.addr:#x}"
            )
    return record


def decode_rpc(value: bytes | memoryview) -> RpcRecord:
    """A handshake address.

    Raises:
        RecordError: it is none.
    """
    try:
        record = msgspec.json.decode(value, type=RpcRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"not a Mooncake handshake address: {error}") from None
    if not record.ip_or_host_name or not 0 < record.rpc_port < 65536:
        raise RecordError(f"{record.ip_or_host_name!r:.200}:{record.rpc_port} is no address")
    return record


def decode_notification(value: bytes | memoryview) -> MooncakeNotification:
    """A message.

    Raises:
        RecordError: it is none.
    """
    try:
        return msgspec.json.decode(value, type=MooncakeNotification)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"not a Mooncake notification: {error}") from None
