"""Encode and decode Mooncake's records of the metadata store and of handshakes. Pure.

    mooncake/[<cluster>/]ram/<name>        the segment record: data port, version, buffers
    mooncake/[<cluster>/]rpc_meta/<name>   the address of the segment's handshake port

Both are JSON. A segment whose name holds a "/" has its record at mooncake/[<cluster>/]<name>.
Unknown fields are ignored. So does Mooncake with the fields that we add to our records:

    "halfmoon": {"segment": …, "generation": …, "epoch": …}        of the segment
    "halfmoon": {"key_hash": …, "read_only": …}                    of a buffer

With these two, Halfmoon engines find each other's keyed regions at absolute addresses. A
region's key stays secret; its hash identifies the buffer. The epoch is a random number that
changes whenever a region is unregistered; see `exposed_regions`.
"""

import hashlib
from datetime import datetime

import msgspec

#: URL that means "no metadata server": segments are named by their handshake address.
P2P = "P2PHANDSHAKE"


class RecordError(ValueError):
    """A record that can't be decoded or used."""


class HalfmoonBufferInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields that a Halfmoon engine adds to Mooncake's record of a buffer."""

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
    """Fields that a Halfmoon engine adds to Mooncake's record of a segment."""

    segment: str
    generation: int
    #: Hexadecimal, because some JSON parsers round numbers of 64 bits.
    epoch: str


class SegmentRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one process's segment."""

    name: str
    protocol: str
    tcp_data_port: int = 0
    #: Absent before Mooncake 0.3.13; then the host of the handshake port is meant.
    tcp_data_host: str = ""
    #: Absent before version 2.
    tcp_proto_version: int = 1
    timestamp: str = ""
    rdma_server_name: str = ""
    buffers: tuple[BufferRecord, ...] = ()
    halfmoon: HalfmoonSegmentInfo | None = None


class RpcRecord(msgspec.Struct, frozen=True):
    """The address of a segment's handshake port."""

    ip_or_host_name: str
    rpc_port: int


class MooncakeNotification(msgspec.Struct, frozen=True):
    """A small message: the sender's name (free text) and the text."""

    name: str
    notify_msg: str


def segment_key(name: str, cluster: str = "") -> str:
    """Return the metadata key of a segment record."""
    return f"{_prefix(cluster)}{name}" if "/" in name else f"{_prefix(cluster)}ram/{name}"


def rpc_key(name: str, cluster: str = "") -> str:
    """Return the metadata key of a handshake address."""
    return f"{_prefix(cluster)}rpc_meta/{name}"


def _prefix(cluster: str) -> str:
    return f"mooncake/{cluster}/" if cluster else "mooncake/"


def hash_key(key: bytes) -> str:
    """Hash a region's key for publication: it identifies the key and does not reveal it."""
    return hashlib.sha256(b"halfmoon region " + key).hexdigest()[:32]


def format_timestamp(now: datetime) -> str:
    """Format a time in Mooncake's format."""
    return now.strftime("%Y-%m-%d %H:%M:%S.%f")


def encode(record: SegmentRecord | RpcRecord | MooncakeNotification) -> bytes:
    """Encode a record as JSON, with the fields that Mooncake requires despite defaults."""
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
    """Decode the record of a segment that is reached over TCP.

    Raises:
        RecordError: it is no record, or of another transport, or has values out of bounds.
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
    """Decode a handshake address.

    Raises:
        RecordError: the value is not an address.
    """
    try:
        record = msgspec.json.decode(value, type=RpcRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"not a Mooncake handshake address: {error}") from None
    if not record.ip_or_host_name or not 0 < record.rpc_port < 65536:
        raise RecordError(f"{record.ip_or_host_name!r:.200}:{record.rpc_port} is no address")
    return record


def decode_notification(value: bytes | memoryview) -> MooncakeNotification:
    """Decode a message.

    Raises:
        RecordError: the value is not a message.
    """
    try:
        return msgspec.json.decode(value, type=MooncakeNotification)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"not a Mooncake notification: {error}") from None
