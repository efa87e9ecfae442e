"""Keep two clusters from sharing one set of records by mistake.

    halfmoon/cluster   {"id": …, "key_ids": […], "beat": …}, under a lease

The first process of a cluster writes the record, and all of its processes keep it alive. A process
belongs to the cluster if one of its cluster keys is among those that the record names, or if
neither has any. The latest start says which keys these are, so a key can be changed step by step.
A key's id is a keyed digest that opens nothing (`halfmoon_protocol.cluster_keys`).

Services of older releases and of other teams write no such record. So where there is none, the
members' records tell whether another cluster is there.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import structlog
from msgspec import Meta

from halfmoon_metadata.redacted_url import redact_url
from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_protocol.cluster_keys import MAX_KEYS, cluster_key_id, split_cluster_keys
from halfmoon_runtime.lifecycle import CannotStart
from halfmoon_runtime.membership import LEASE_S, MEMBERS, readable_members, until_done

CLUSTER = "halfmoon/cluster"
#: Seconds beyond the lease until a record that nothing renews must be gone.
_LATE_S = 2.0
_POLL_S = 0.25
_WRITE_TRIES = 10
#: A longer record is none that a process of ours wrote.
_MAX_RECORD_BYTES = 4096
_MAX_BEAT = 2**53

_log = structlog.get_logger(__name__)


class AnotherCluster(CannotStart):
    """The metadata server holds the records of a cluster with another key."""


class ClusterRecord(msgspec.Struct, frozen=True):
    """The record of one cluster."""

    #: Drawn by the process that wrote the record first.
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]
    #: Ids of the cluster's keys; none: it has no key.
    key_ids: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=MAX_KEYS)]
    #: Counts renewals, so that each process sees those of the others.
    beat: Annotated[int, Meta(ge=0, le=_MAX_BEAT)] = 0


_decoder: msgspec.json.Decoder[ClusterRecord] = msgspec.json.Decoder(ClusterRecord)


class ClusterClaim:
    """Claim the metadata server's records for this process's cluster, and keep the claim alive.

    Args:
        store: the records of one cluster, see `halfmoon_metadata.cluster_namespace`.
        cluster_key: this process's keys, as its settings have them.
        url: of the metadata server, for messages.
        ttl_s: seconds of the lease.
    """

    def __init__(
        self, store: MetadataStore, cluster_key: str, url: str, *, ttl_s: float = LEASE_S
    ) -> None:
        self._store = store
        self._key_ids = tuple(map(cluster_key_id, split_cluster_keys(cluster_key)))
        self._url = url
        self._ttl_s = ttl_s
        #: The cluster's record as this process last read or wrote it.
        self._last = ClusterRecord(secrets.token_hex(8), self._key_ids)
        #: Id of another cluster that took the record, once it was logged.
        self._logged = ""

    async def take(self) -> None:
        """Claim the records; wait for the metadata server without limit.

        A record that nothing renews is waited for until its lease is over.

        Raises:
            AnotherCluster: they are another cluster's, which lives.
        """
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + self._ttl_s + _LATE_S
        first: ClusterRecord | None = None
        while True:
            other, reason = await until_done(CLUSTER, lambda: asyncio.to_thread(self._take_now))
            if not reason:
                return
            first = first or other
            is_renewed = first is not None and other is not None and other != first
            if is_renewed or now_s() >= deadline_s:
                raise AnotherCluster(f"{reason}: {_ways_out(self._url)}")
            await asyncio.sleep(_POLL_S)

    async def keep(self) -> None:
        """Renew the record until cancelled, and write it again where the server has lost it."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            await until_done(CLUSTER, lambda: asyncio.to_thread(self._renew_now))

    def _take_now(self) -> tuple[ClusterRecord | None, str]:
        """Claim the records; return another cluster's record and what it is, or empty text."""
        for _ in range(_WRITE_TRIES):
            current = self._store.get(CLUSTER)
            there = _read(current)
            if there is not None and not self._is_ours(there):
                return there, self._describe(there)
            if there is None and (stranger := self._find_stranger()):
                return None, stranger
            mine = self._last if there is None else there
            mine = msgspec.structs.replace(mine, key_ids=self._key_ids, beat=_after(mine))
            if self._write(current, mine):
                return None, ""
        return None, f"{CLUSTER!r} changed under each of {_WRITE_TRIES} writes"

    def _renew_now(self) -> None:
        current = self._store.get(CLUSTER)
        there = _read(current)
        if there is not None and not self._is_ours(there):
            if self._logged != there.id:
                self._logged = there.id
                _log.error(
                    "another_cluster", error=f"{self._describe(there)}: {_ways_out(self._url)}"
                )
            return
        if there is not None and there != self._last:
            self._last = there  # another process has renewed it meanwhile
            return
        self._write(current, msgspec.structs.replace(self._last, beat=_after(self._last)))

    def _write(self, current: bytes | None, record: ClusterRecord) -> bool:
        value = msgspec.json.encode(record)
        written = self._store.compare_and_swap(CLUSTER, current, value, ttl_s=self._ttl_s)
        if written:
            self._last = record
        return written

    def _is_ours(self, record: ClusterRecord) -> bool:
        if not record.key_ids or not self._key_ids:
            return record.key_ids == self._key_ids
        return not set(record.key_ids).isdisjoint(self._key_ids)

    def _find_stranger(self) -> str:
        """Return which member shows that another cluster is there; empty: none does.

        A member that names no key may be of any cluster: not all implementations name it.
        """
        for info in readable_members(self._store.list(MEMBERS)).values():
            if info.key_id and info.key_id not in self._key_ids:
                return (
                    f"the metadata server {redact_url(self._url)} has {info.worker_id} of another "
                    f"cluster, whose key has id {info.key_id}; this one has {_named(self._key_ids)}"
                )
        return ""

    def _describe(self, other: ClusterRecord) -> str:
        return (
            f"the metadata server {redact_url(self._url)} holds another cluster, {other.id}, which "
            f"has {_named(other.key_ids)}; this one has {_named(self._key_ids)}"
        )


def _read(value: bytes | None) -> ClusterRecord | None:
    """Return a record; None for what no process of ours wrote, which is replaced."""
    if value is None or len(value) > _MAX_RECORD_BYTES:
        return None
    try:
        return _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _after(record: ClusterRecord) -> int:
    return (record.beat + 1) % _MAX_BEAT


def _named(key_ids: Sequence[str]) -> str:
    if not key_ids:
        return "no cluster key"
    return f"key id{'s' if len(key_ids) > 1 else ''} {', '.join(key_ids)}"


def _ways_out(url: str) -> str:
    """Name what keeps two clusters apart."""
    parts = urlsplit(url)
    number = parts.path.strip("/") or "0"
    another = "--metadata with a server of its own"
    if parts.scheme in ("redis", "rediss") and number.isdecimal():
        another += f", or another database such as …/{int(number[:6]) + 1}"
    return (
        f"give this cluster a name of its own with --cluster NAME, or {another}; "
        "if it is the same cluster, give it the same key with HALFMOON_CLUSTER_KEY_FILE"
    )
