"""Encrypt sockets by CURVE, and let in callers that have the cluster key.

Encryption alone keeps out processes without the ports' public key. The check of callers' keys
(ZAP, https://rfc.zeromq.org/spec/27/) keeps out those that have it.
"""

import hmac

import zmq
from zmq.utils import z85

from halfmoon_protocol.curve_secrets import CurveSecrets
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.socket_pump import Frames, SocketPump

#: Where libzmq asks about a caller; the address is part of ZAP.
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
#: Frames of a question: the asker's address, an empty frame, version, id, domain, address,
#: identity, mechanism and a credential.
_ZAP_FRAMES = 9
#: With a domain, libzmq refuses callers for as long as no answer comes.
_ZAP_DOMAIN = b"halfmoon"


class Curve:
    """Key pairs of one cluster, and the check of callers.

    Args:
        context: of all sockets that are encrypted.
        secrets: of the cluster.

    Raises:
        RuntimeError: this libzmq was built without CURVE.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", secrets: CurveSecrets) -> None:
        if not zmq.has("curve"):
            raise RuntimeError(
                "HALFMOON_CLUSTER_KEY is set, and this libzmq has no CURVE: install pyzmq's wheel"
            )
        self._port_secret, self._caller_secret = map(z85.encode, secrets)
        self._port_public = zmq.curve_public(self._port_secret)
        self._caller_public = zmq.curve_public(self._caller_secret)
        self._allowed = z85.decode(self._caller_public)
        self._context = context
        self._answers: SocketPump | None = None

    def serve(self, socket: "zmq.Socket[bytes]") -> None:
        """Make a socket a port: call it before it binds, on the event loop that will run."""
        if self._answers is None:
            self._start_to_answer()
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._port_secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def call(self, socket: "zmq.Socket[bytes]") -> None:
        """Make a socket a caller: call it before it connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._port_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._caller_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._caller_secret)

    def close(self) -> None:
        """Answer no more; closing twice does no harm."""
        if self._answers is not None:
            self._answers.stop()
            self._answers.socket.close(linger=0)

    def _start_to_answer(self) -> None:
        socket = self._context.socket(zmq.ROUTER)
        socket.bind(_ZAP_ENDPOINT)
        self._answers = SocketPump(socket, kept_frames=_ZAP_FRAMES)
        self._answers.start(self._answer)

    def _answer(self, frames: Frames) -> None:
        """Let in, or not; the frames come from libzmq in this process."""
        assert self._answers is not None
        asker, _, _, request_id = frames[:4]
        address, mechanism, credential = frames[5], frames[7], frames[8]
        is_known = mechanism == b"CURVE" and hmac.compare_digest(credential, self._allowed)
        if not is_known:
            record_drop("stranger", address.decode(errors="replace"), "another key")
        status, text = (b"200", b"") if is_known else (b"400", b"another key")
        self._answers.send_now(asker, b"", _ZAP_VERSION, request_id, status, text, b"", b"")
