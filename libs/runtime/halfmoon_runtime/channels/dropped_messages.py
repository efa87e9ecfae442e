"""Count, log and drop invalid messages.

A peer that sends only garbage must not fill the log. After the first few of a kind only every
thousandth is logged; the counter counts them all.
"""

from collections import Counter as Tally

import structlog
from prometheus_client import Counter

from halfmoon_protocol.errors import MessageTooLarge, ProtocolError, UnknownVersion

DROPPED_MESSAGES = Counter(
    "halfmoon_dropped_messages",
    "Messages that were dropped because they could not be read or not be delivered.",
    ["reason"],
)
_LOGGED_AT_FIRST = 20
_LOGGED_THEN_EVERY = 1000

_log = structlog.get_logger(__name__)
_dropped: Tally[str] = Tally()


def record_drop(reason: str, where: str, detail: object = "") -> None:
    """Count one dropped message and log it.

    Args:
        reason: short name of the kind of fault; a label of the metric, so never a peer's text.
        where: endpoint of the sender or the receiver.
        detail: exact fault.
    """
    DROPPED_MESSAGES.labels(reason).inc()
    _dropped[reason] += 1
    n = _dropped[reason]
    if n <= _LOGGED_AT_FIRST or n % _LOGGED_THEN_EVERY == 0:
        _log.warning("message dropped", reason=reason, where=where, detail=str(detail), n=n)


def drop_reason(error: ProtocolError) -> str:
    """Return the kind of a protocol error, as a reason for `record_drop`."""
    if isinstance(error, MessageTooLarge):
        return "too_large"
    return "unknown_version" if isinstance(error, UnknownVersion) else "malformed"
