"""The one loop in which a worker takes messages, and its last line of defence.

Messages are checked where they are read (`halfmoon_protocol.bounds`) and where they arrive (each
worker, against its own state). What still raises is a mistake of ours. It costs that message: the
log has its type and sender, the counter counts it, and the worker goes on. Tests assert that
the counter does not move.
"""

from collections.abc import Awaitable, Callable
from typing import NoReturn

import structlog
from prometheus_client import Counter

from halfmoon_protocol.messages import AnyMessage, Message
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.network import PeerId, Port
from halfmoon_runtime.worker.conductor_connections import RejectedByConductors

FAILED_MESSAGES = Counter(
    "halfmoon_failed_messages",
    "Messages whose handling ended in an unexpected error, which the log has.",
    ["message_type"],
)

log = structlog.get_logger()


async def serve_messages(
    port: Port, handle: Callable[[PeerId, AnyMessage], Awaitable[None]]
) -> NoReturn:
    """Hand a port's messages to `handle`, one after another, until cancelled.

    Raises:
        PeerUnreachable: the port is closed.
        Unwanted: no conductor wants this worker.
    """
    while True:
        peer, message = await port.receive()
        try:
            await handle(peer, message)
        except RejectedByConductors:
            raise
        except Exception:
            record_failure(message, peer.hex())


def record_failure(message: object, sender: str) -> None:
    """Count and log that this message could not be handled; called in an `except` block."""
    name = type(message).__name__
    FAILED_MESSAGES.labels(name).inc()
    log.exception("message_failed", message_type=name, sender=sender)


def drop_unexpected(port: Port, message: Message) -> None:
    """A message that this kind of worker does not take: counted, logged, dropped."""
    record_drop("unexpected", port.commands, type(message).__name__)
