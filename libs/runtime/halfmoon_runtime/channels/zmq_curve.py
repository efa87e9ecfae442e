"""Encrypt sockets by CURVE, and let in callers that have the cluster key.

Encryption alone keeps out processes without the ports' public key. The check of callers' keys
(ZAP, https://rfc.zeromq.org/spec/27/) keeps out those that have it.

While a cluster's key is changed, a process has several. Its ports serve with the first one. A
caller takes both pairs, the port's and its own, from the key that the port's record names.
"""

import hmac
from collections.abc import Sequence

import zmq
from zmq.utils import z85

from halfmoon_protocol.cluster_keys import cluster_key_id
from halfmoon_protocol.curve_secrets import CurveSecrets, curve_secrets
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


class _KeyPairs:
    """Both pairs of one cluster key, in Z85 as libzmq takes them."""

    def __init__(self, secrets: CurveSecrets) -> None:
        self.port_secret, self.caller_secret = map(z85.encode, secrets)
        self.port_public = zmq.curve_public(self.port_secret)
        self.caller_public = zmq.curve_public(self.caller_secret)


class Curve:
    """Key pairs of one cluster, and the check of callers.

    Args:
        context: of all sockets that are encrypted.
        keys: cluster keys, at least one; ports serve with the first.

    Raises:
        RuntimeError: this libzmq was built without CURVE.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: Sequence[str]) -> None:
        if not zmq.has("curve"):
            raise RuntimeError(
                "there is a cluster key, and this libzmq has no CURVE: install pyzmq's wheel"
            )
        #: By id of the key, in the order of the keys.
        self._pairs = {cluster_key_id(key): _KeyPairs(curve_secrets(key)) for key in keys}
        #: Id of the key that ports serve with.
        self.key_id = next(iter(self._pairs))
        #: What ZAP names callers by that took their pair from the same key.
        self._allowed = z85.decode(self._pairs[self.key_id].caller_public)
        self._context = context
        self._answers: SocketPump | None = None

    def serve(self, socket: "zmq.Socket[bytes]") -> None:
        """Make a socket a port: call it before it binds, on the event loop that will run."""
        if self._answers is None:
            self._start_to_answer()
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pairs[self.key_id].port_secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def call(self, socket: "zmq.Socket[bytes]", key_id: str) -> None:
        """Make a socket a caller: call it before it connects.

        Args:
            socket: the caller.
            key_id: id of the key that the port serves with, one of ours; empty: our first key.
        """
        pairs = self._pairs[key_id or self.key_id]
        socket.setsockopt(zmq.CURVE_SERVERKEY, pairs.port_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pairs.caller_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pairs.caller_secret)

    def knows(self, key_id: str) -> bool:
        """Return whether a port that serves with the key of this id can be called."""
        return not key_id or key_id in self._pairs

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


def find_key_fault(curve: Curve | None, key_id: str) -> str:
    """Return why a port that serves with the key of this id can't be called; empty if it can."""
    if curve is None and key_id:
        return (
            f"the port has cluster key {key_id}, and this process has none: set "
            "HALFMOON_CLUSTER_KEY or HALFMOON_CLUSTER_KEY_FILE"
        )
    if curve is not None and not curve.knows(key_id):
        return (
            f"the port serves with cluster key {key_id}, which this process does not have: a step "
            "of changing the key is missing. Give this process that key too, in a second line, "
            "and restart it"
        )
    return ""
