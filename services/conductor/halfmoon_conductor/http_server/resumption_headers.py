"""Read the two headers by which a client goes on with a broken stream.

`Idempotency-Key` names a stream, and `Last-Event-ID` the last event that the client has. An event's
id also tells of which body and which tokens it is. So a wrong continuation is noticed by any
conductor, whether it has kept the stream or not.
"""

import asyncio
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from starlette.types import Scope

from halfmoon_conductor.errors import InvalidRequest

KEY_PATTERN = r"^[!-~]{1,255}$"
EVENT_ID_PATTERN = r"^[1-9][0-9]{0,8}-[0-9a-f]{12}-[0-9a-f]{12}$"
_KEY, _EVENT_ID = re.compile(KEY_PATTERN), re.compile(EVENT_ID_PATTERN)
_TAG_BYTES = 6
_SEED_MASK = 2**63 - 1
#: Bodies above this size are hashed in a thread: a MiB takes about a millisecond.
_MAX_INLINE_BYTES = 256 * 1024


class EventId(NamedTuple):
    """The id of one event of a stream."""

    #: Counted from 1.
    number: int
    #: `Resumption.body_tag`.
    body_tag: str
    #: Of the tokens up to this event.
    token_tag: str

    def __str__(self) -> str:
        """Write the id as clients receive it."""
        return f"{self.number}-{self.body_tag}-{self.token_tag}"


@dataclass(frozen=True)
class Resumption:
    """The stream that a request names."""

    #: Hash of tenant and key, in hex: the same at every conductor.
    name: str
    #: Short hash of route and body.
    body_tag: str
    #: The last event that the client has; None: it has none.
    last: EventId | None = None

    @property
    def answer_id(self) -> str:
        """Part of the answer's id, in 32 hex digits."""
        return self._derive(b"answer").hex()

    @property
    def seed(self) -> int:
        """Seed of a request without one, less than 2^63."""
        return int.from_bytes(self._derive(b"seed")) & _SEED_MASK

    def _derive(self, purpose: bytes) -> bytes:
        return blake2b(bytes.fromhex(self.name), digest_size=16, person=purpose).digest()


async def resumption_of(scope: Scope, tenant: str, content: bytes) -> Resumption | None:
    """Return the stream that a request names; None: it names none.

    Args:
        scope: the request's.
        tenant: the tenant's name; no other tenant's key names the same stream.
        content: the body.

    Raises:
        InvalidRequest: a header has a wrong form.
    """
    keys = [value for name, value in scope["headers"] if name == b"idempotency-key"]
    lasts = [value for name, value in scope["headers"] if name == b"last-event-id"]
    if not keys:
        if lasts:
            raise InvalidRequest(
                "Last-Event-ID needs the Idempotency-Key with which the stream was asked for.",
                param="last-event-id",
            )
        return None
    key = _only("Idempotency-Key", keys, _KEY, "1 to 255 visible ASCII characters, without spaces")
    last = None
    if lasts:
        text = _only("Last-Event-ID", lasts, _EVENT_ID, "an id of an event of this stream")
        number, body_tag, token_tag = text.split("-")
        last = EventId(int(number), body_tag, token_tag)
    name = blake2b(f"{tenant}\0{key}".encode(), digest_size=32)
    path = scope["path"].encode(errors="replace")
    if len(content) <= _MAX_INLINE_BYTES:
        body_tag = _body_tag(name.digest(), path, content)
    else:
        body_tag = await asyncio.to_thread(_body_tag, name.digest(), path, content)
    return Resumption(name.hexdigest(), body_tag, last)


def _body_tag(name: bytes, path: bytes, content: bytes) -> str:
    # The name is the hash's key: equal bodies of two tenants have different tags.
    tag = blake2b(path + b"\0", key=name, digest_size=_TAG_BYTES)
    tag.update(content)
    return tag.hexdigest()


def _only(header: str, values: list[bytes], pattern: re.Pattern[str], form: str) -> str:
    """Return the value of a header that may be there once."""
    if len(values) > 1:
        raise InvalidRequest(
            f"{header} is there {len(values)} times; send it once.", param=header.lower()
        )
    value = values[0].decode("latin-1")
    if not pattern.fullmatch(value):
        raise InvalidRequest(
            f"{header} has {len(value)} characters and must be {form}.", param=header.lower()
        )
    return value
