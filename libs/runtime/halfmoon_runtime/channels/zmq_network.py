"""Bind ports and dial links over ZeroMQ: TCP, heartbeats, bounded queues.

A port (`zmq_port`) is a ROUTER for commands and a PUB for events; a link (`zmq_link`) is a
DEALER and a SUB. On ROUTER and DEALER a message is one frame of `halfmoon_protocol.codec`.
A publication has two frames (topic, codec frame), or three in vLLM's format of KV events.
"""

import asyncio
import threading
from contextlib import suppress

import structlog
import zmq

from halfmoon_protocol.cluster_keys import split_cluster_keys
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.zmq_curve import Curve, find_key_fault
from halfmoon_runtime.channels.zmq_link import ZmqLink
from halfmoon_runtime.channels.zmq_port import ZmqPort
from halfmoon_runtime.channels.zmq_sockets import SocketSettings

#: Longest wait for the end of a context, in seconds.
_TERM_S = 5.0
#: Contexts of networks that are not closed. One that were collected as garbage together with its
#: sockets would wait for them, in the collector, for ever.
_open_contexts: set[zmq.Context[zmq.Socket[bytes]]] = set()
_log = structlog.get_logger(__name__)


class ZmqNetwork:
    """A `Network` over ZeroMQ; close it on the event loop that used it.

    Args:
        settings: bounds of all sockets.
        advertise_host: name or address that callers dial; None: the bound address.
        cluster_key: both sides prove it, and messages are encrypted; empty: neither. It may hold
            several keys, see `halfmoon_protocol.cluster_keys`.

    Raises:
        ValueError: a key is too short.
        RuntimeError: this libzmq can't encrypt.
    """

    def __init__(
        self,
        settings: SocketSettings | None = None,
        *,
        advertise_host: str | None = None,
        cluster_key: str = "",
    ) -> None:
        self._settings = settings or SocketSettings()
        self._advertise_host = advertise_host
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # libzmq's own default, 1,023, would be met by some 170 links.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        _open_contexts.add(self._context)
        keys = split_cluster_keys(cluster_key)
        self._curve = Curve(self._context, keys) if keys else None
        self._open: set[ZmqPort | ZmqLink] = set()

    async def bind(self, name: str, *, host: str = "127.0.0.1") -> ZmqPort:
        """See `Network.bind`.

        Raises:
            OSError: `host` is no address of this machine, or no port is free.
        """
        advertised = self._advertise_host or host
        port = ZmqPort(
            self._context,
            name,
            host,
            advertised,
            self._settings,
            self._curve,
            self._open.discard,
        )
        self._open.add(port)
        return port

    async def dial(self, commands: str, events: str | None = None, *, key_id: str = "") -> ZmqLink:
        """See `Network.dial`. Return when the link is up, or known to be down.

        The link is down after the connect timeout, or at once where this process may open no more
        sockets; then `receive` and `send` raise. Events published in the first moments after the
        handshake may be missed.
        """
        link = ZmqLink(self._context, commands, events, self._settings, self._curve, key_id)
        if fault := find_key_fault(self._curve, key_id):
            record_drop("unknown_key", commands, fault)
            link.break_off(f"{commands}: {fault}")
        self._open.add(link)
        link.task.add_done_callback(lambda _: self._open.discard(link))
        await link.connect()
        return link

    async def close(self) -> None:
        """See `Network.close`."""
        closed: set[ZmqPort | ZmqLink] = set()
        # A link may be dialled meanwhile. The context would wait for its sockets for ever.
        while opened := self._open - closed:
            for one in opened:
                await one.close()
            closed |= opened
        if self._curve is not None:
            self._curve.close()
        if await _ends(self._context):
            _open_contexts.discard(self._context)
        else:
            _log.error("zmq_context_hangs", seconds=_TERM_S, reaction="it is left as it is")


async def _ends(context: "zmq.Context[zmq.Socket[bytes]]") -> bool:
    """Terminate a context, and return whether that came to an end in time.

    It waits for the linger of the sockets, so not on the event loop. A socket that is still open
    would hold it for ever. So it has a thread for which the end of the process does not wait.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def terminate() -> None:
        context.term()
        with suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=terminate, name="zmq end", daemon=True).start()
    try:
        async with asyncio.timeout(_TERM_S):
            await ended.wait()
    except TimeoutError:
        return False
    return True
