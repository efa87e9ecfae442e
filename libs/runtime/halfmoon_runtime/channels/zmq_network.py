"""Bind ports and dial links over ZeroMQ: TCP, heartbeats, bounded queues.

A port (`zmq_port`) is a ROUTER for commands and a PUB for events; a link (`zmq_link`) is a
DEALER and a SUB. On ROUTER and DEALER a message is one frame of `halfmoon_protocol.codec`.
A publication has two frames (topic, codec frame), or three in vLLM's format of KV events.
"""

import asyncio

import zmq

from halfmoon_protocol.cluster_keys import split_cluster_keys
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.zmq_curve import Curve, find_key_fault
from halfmoon_runtime.channels.zmq_link import ZmqLink
from halfmoon_runtime.channels.zmq_port import ZmqPort
from halfmoon_runtime.channels.zmq_sockets import SocketSettings

#: Contexts of networks that are not closed. One that were collected as garbage together with its
#: sockets would wait for them, in the collector, for ever.
_open_contexts: set[zmq.Context[zmq.Socket[bytes]]] = set()


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

        The link is down after the connect timeout; then `receive` and `send` raise. Events
        published in the first moments after the handshake may be missed.
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
        # This waits for the linger of the sockets, so not on the event loop.
        await asyncio.to_thread(self._context.term)
        _open_contexts.discard(self._context)
