"""Hand a worker's messages to its handler, and survive errors in it.

Messages are checked when they are decoded (`halfmoon_protocol.bounds`) and when they are handled
(by each worker, against its own state). An error that is still raised is a bug of ours. It costs
that message only: the log names its type and sender, the counter counts it, and the worker goes
on. Tests assert that the counter stays at zero.
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
    "Messages and events of the core whose handling ended in an unexpected error, see the log.",
    ["message_type"],
)

log = structlog.get_logger()


async def serve_messages(
    port: Port, handle: Callable[[PeerId, AnyMessage], Awaitable[None]]
) -> NoReturn:
    """Hand a port's messages to `handle`, one after another, until cancelled.

    Raises:
        PeerUnreachable: the port is closed.
        RejectedByConductors: no conductor accepts this worker.
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
    """Count, log and drop a message that this kind of worker does not handle."""
    record_drop("unexpected", port.commands, type(message).__name__)
