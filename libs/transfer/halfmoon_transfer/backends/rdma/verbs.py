"""Wrap pyverbs, whatever its version; no other module imports it.

pyverbs belongs to the system's rdma-core (Debian: python3-pyverbs) and is optional. Newer versions
moved their enums to other modules and show the descriptors of their channels; older ones don't.
No call of pyverbs releases the interpreter lock, so nothing here may block. Events are only taken
from a channel whose descriptor a poll has found readable.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from halfmoon_transfer.interface import BackendUnavailable

_missing: ImportError | None = None
_e: Any = None
_PyverbsError: Any = OSError
try:
    import pyverbs.device as _device
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.mr import MR, DmaBufMR
    from pyverbs.pd import PD
    from pyverbs.pyverbs_error import PyverbsError
    from pyverbs.qp import QP, QPAttr, QPCap, QPEx, QPInitAttr, QPInitAttrEx
    from pyverbs.wr import SGE, RecvWR, SendWR

    try:
        _e = import_module("pyverbs.enums")
    except ImportError:
        _e = import_module("pyverbs.libibverbs_enums")
    _PyverbsError = PyverbsError
except ImportError as error:
    _missing = error

T = TypeVar("T")
#: The only port of RoCE devices.
PORT = 1
#: Reads that one queue pair may have outstanding, where the device allows it.
_MAX_READS = 16
#: Timeout of an acknowledgement: 4.096 µs · 2^14 = 67 ms, and the number of retries. A dead link
#: shows within about half a second. 7 is no count: some drivers then retry for ever.
_TIMEOUT_EXPONENT = 14
_RETRIES = 3
#: Pause that an owner without posted receives asks for (12: 0.64 ms); one-sided operations never
#: need receives.
_RNR_TIMER = 12
#: Receives posted per queue pair, for announcements of the other end.
RECEIVES = 4
#: Held while a new descriptor is found by comparing lists, so that no other thread opens or closes
#: a channel meanwhile.
_channels = threading.Lock()


class VerbsError(OSError):
    """A failed call of the verbs API; the text names the call, the object and the reason."""


class CompletionStatus:
    """Completion statuses of the verbs API that are told apart (`enum ibv_wc_status`)."""

    SUCCESS = 0
    LOCAL_LENGTH = 1
    LOCAL_PROTECTION = 4
    FLUSHED = 5
    BAD_REQUEST = 9
    REMOTE_ACCESS = 10
    #: Faults of the request and not of the rail: the queue pair needs only a reset.
    OF_THE_REQUEST = frozenset({LOCAL_LENGTH, LOCAL_PROTECTION, BAD_REQUEST, REMOTE_ACCESS})


_STATUS_NAMES = {
    0: "success",
    1: "local length error",
    2: "local queue pair operation error",
    4: "local protection error",
    5: "flushed",
    6: "memory window bind error",
    7: "bad response",
    8: "local access error",
    9: "remote invalid request",
    10: "remote access error",
    11: "remote operation error",
    12: "no acknowledgement after all retries",
    13: "receiver not ready after all retries",
    19: "fatal device error",
    20: "response timeout",
    21: "general error",
}


def completion_status_text(status: int) -> str:
    """Return a completion status in words."""
    return f"{_STATUS_NAMES.get(status, 'completion status')} ({status})"


class WorkCompletion(msgspec.Struct, frozen=True):
    """The end of one posted operation. For a failed one only number and status are valid."""

    wr_id: int
    status: int
    #: The 32 bits of an announcement; undefined for our own operations.
    immediate: int = 0


class RdmaOperation(msgspec.Struct, frozen=True, gc=False):
    """One read or write. With a length of 0 the local memory must be registered all the same."""

    #: Number that the completion repeats.
    wr_id: int
    #: Of the local memory.
    address: int
    length: int
    lkey: int
    rkey: int
    remote_address: int


class PortState(msgspec.Struct, frozen=True):
    """The current state of a port."""

    active: bool
    #: Code of the path MTU: 1 is 256 bytes, 5 is 4096.
    mtu: int
    max_message_bytes: int


class RemoteEnd(msgspec.Struct, frozen=True):
    """The other end of a queue pair's connection."""

    gid: str
    queue_pair: int
    psn: int
    mtu: int
    max_reads: int


@contextmanager
def _translated(doing: str) -> Generator[None]:
    try:
        yield
    except _PyverbsError as error:
        raise VerbsError(f"{doing}: {error}") from error


def device_names() -> list[str]:
    """Return the names of the RDMA devices of this machine.

    Raises:
        BackendUnavailable: there is no pyverbs, or the kernel has no verbs.
    """
    if _missing is not None:
        raise BackendUnavailable(
            f"backend rdma needs pyverbs, which comes with the system's rdma-core "
            f"(Debian: python3-pyverbs) and must be on this Python's path: {_missing}"
        )
    try:
        return sorted(each.name.decode() for each in _device.get_device_list())
    except _PyverbsError as error:
        raise BackendUnavailable(
            f"backend rdma: this kernel offers no RDMA devices ({error}); "
            "load the NIC's driver, or rdma_rxe for a software device"
        ) from error


class MemoryRegistration:
    """Memory that a device may access; the caller of `register` keeps it alive."""

    def __init__(self, mr: Any) -> None:
        self._mr = mr
        self.lkey = int(mr.lkey)
        self.rkey = int(mr.rkey)

    def close(self) -> None:
        """End the registration: the device refuses accesses with its keys from now on."""
        with _translated("deregistering memory"):
            self._mr.close()


class CompletionQueue:
    """Completions of the queue pairs of one rail, and a descriptor to wait for them."""

    def __init__(self, context: Any, depth: int) -> None:
        with _translated("making a completion queue"):
            self._channel, self.fd = _with_event_fd(lambda: CompChannel(context))
            self._cq = CQ(context, depth, None, self._channel, 0)
        self._armed = False

    @property
    def handle(self) -> Any:
        """The pyverbs object, for making queue pairs."""
        return self._cq

    def poll(self, n: int) -> list[WorkCompletion]:
        """Take up to `n` completions."""
        try:
            _, found = self._cq.poll(n)
        except _PyverbsError as error:
            raise VerbsError(f"polling a completion queue: {error}") from error
        return [
            WorkCompletion(int(each.wr_id), int(each.status), socket.ntohl(int(each.imm_data)))
            for each in found
        ]

    def arm(self) -> bool:
        """Let the next completion make `fd` readable; return whether to poll again first."""
        if self._armed:
            return False
        with _translated("arming a completion queue"):
            self._cq.req_notify()
        self._armed = True
        return True

    def take_event(self) -> None:
        """Take an event after `fd` was found readable; without an event this blocks for ever."""
        with _translated("taking a completion event"):
            self._channel.get_cq_event(self._cq)
            self._cq.ack_events(1)
        self._armed = False

    def close(self) -> None:
        """Destroy the queue; its queue pairs are closed already."""
        with _translated("closing a completion queue"), _channels:
            self._cq.close()
            self._channel.close()


class QueuePair:
    """One end of a reliable connection."""

    def __init__(self, qp: Any, *, extended: bool) -> None:
        self._qp = qp
        #: Whether the driver posts operations without an object for each.
        self._extended = extended
        self._sge = SGE(0, 0, 0)
        self.number = int(qp.qp_num)

    def connect(self, end: RemoteEnd, *, psn: int, gid_index: int, mtu: int, reads: int) -> None:
        """Connect a reset queue pair, until it is ready to send.

        Raises:
            VerbsError: the address can't be resolved, or the port is down.
        """
        with _translated(f"connecting to {end.gid}"):
            attr = QPAttr(port_num=PORT)
            attr.qp_access_flags = _e.IBV_ACCESS_REMOTE_WRITE | _e.IBV_ACCESS_REMOTE_READ
            attr.path_mtu = min(mtu, end.mtu)
            attr.dest_qp_num, attr.rq_psn, attr.sq_psn = end.queue_pair, end.psn, psn
            attr.max_rd_atomic = attr.max_dest_rd_atomic = max(1, min(reads, end.max_reads))
            attr.min_rnr_timer = _RNR_TIMER
            attr.timeout, attr.retry_cnt, attr.rnr_retry = _TIMEOUT_EXPONENT, _RETRIES, _RETRIES
            route = GlobalRoute(dgid=GID(end.gid), sgid_index=gid_index, hop_limit=64)
            attr.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
            self._qp.to_rts(attr)

    def reset(self) -> None:
        """Forget the connection; packets that still come are dropped."""
        self._to(_e.IBV_QPS_RESET, "resetting a queue pair")

    def fail(self) -> None:
        """End the posted operations: they complete as flushed."""
        self._to(_e.IBV_QPS_ERR, "failing a queue pair")

    def _to(self, state: Any, doing: str) -> None:
        with _translated(doing):
            attr = QPAttr()
            attr.qp_state = state
            self._qp.modify(attr, _e.IBV_QP_STATE)

    def post(self, run: Sequence[RdmaOperation], reports: Sequence[bool], *, write: bool) -> int:
        """Post operations, in order.

        They complete in order. A completion implies that earlier operations without a report
        succeeded.

        Args:
            run: the operations.
            reports: for each, whether it reports success; failures are always reported.
            write: whether they are writes; else reads.

        Returns:
            How many were posted; the rest was not.
        """
        post = self._post_extended if self._extended else self._post_one
        n_taken = 0
        with contextlib.suppress(_PyverbsError):
            # One call each: a software device does the work within the call, and the first
            # completions should not wait for the last operation of a long run.
            for each, is_reported in zip(run, reports, strict=True):
                post(each, write, is_reported)
                n_taken += 1
        return n_taken

    def _post_extended(self, operation: RdmaOperation, write: bool, is_reported: bool) -> None:
        qp, sge = self._qp, self._sge
        qp.wr_start()
        qp.wr_id = operation.wr_id
        qp.wr_flags = _e.IBV_SEND_SIGNALED if is_reported else 0
        describe = qp.wr_rdma_write if write else qp.wr_rdma_read
        describe(operation.rkey, operation.remote_address)
        sge.addr, sge.length, sge.lkey = operation.address, operation.length, operation.lkey
        qp.wr_set_sge(sge)
        qp.wr_complete()

    def _post_one(self, operation: RdmaOperation, write: bool, is_reported: bool) -> None:
        opcode = _e.IBV_WR_RDMA_WRITE if write else _e.IBV_WR_RDMA_READ
        self._qp.post_send(_request(operation, opcode, is_reported=is_reported))

    def announce(self, operation: RdmaOperation, immediate: int) -> None:
        """Write, and complete one `receive` of the other end with 32 bits.

        Raises:
            VerbsError: it was not posted.
        """
        with _translated("posting an announcement"):
            opcode = _e.IBV_WR_RDMA_WRITE_WITH_IMM
            self._qp.post_send(_request(operation, opcode, socket.htonl(immediate)))

    def receive(self, local: tuple[int, int, int]) -> None:
        """Post a receive for one more announcement; at most `RECEIVES` may be open.

        Args:
            local: address, length and lkey. Nothing is put there, as the other end's write has
                its own address; but pyverbs requires them.

        Raises:
            VerbsError: it was not posted.
        """
        with _translated("posting a receive"):
            self._qp.post_recv(RecvWR(num_sge=1, sg=[SGE(*local)]))

    def close(self) -> None:
        """Destroy the queue pair: posted operations access no memory any more."""
        with _translated("closing a queue pair"):
            self._qp.close()


class VerbsContext:
    """An opened device and its protection domain."""

    def __init__(self, name: str) -> None:
        with _translated(f"opening RDMA device {name}"), _channels:
            self._context = _device.Context(name=name)
            self._domain = PD(self._context)
            self.max_reads = min(_MAX_READS, int(self._context.query_device().max_qp_rd_atom))

    def port(self) -> PortState:
        """Return the current state of the port."""
        with _translated("querying a port"):
            attr = self._context.query_port(PORT)
        active = int(attr.state) == int(_e.IBV_PORT_ACTIVE)
        return PortState(active, int(attr.active_mtu), int(attr.max_msg_sz))

    def register(
        self, address: int, n_bytes: int, *, writable: bool, remote: bool
    ) -> MemoryRegistration:
        """Let the device access memory; with `remote`, also peers that know the rkey.

        Raises:
            VerbsError: the memory can't be pinned (mind `ulimit -l`).
        """
        access = _access(writable=writable, remote=remote)
        with _translated(f"registering {n_bytes} bytes (see also `ulimit -l`)"):
            return MemoryRegistration(MR(self._domain, n_bytes, access, address=address))

    def register_dma_buf(
        self, fd: int, offset: int, n_bytes: int, *, writable: bool
    ) -> MemoryRegistration:
        """Let peers access a range of a dma-buf; addresses are offsets in the buffer.

        Raises:
            VerbsError: the driver or the kernel can't, or the descriptor is no dma-buf.
        """
        access = _access(writable=writable, remote=True)
        with _translated(f"registering {n_bytes} bytes of a dma-buf"):
            return MemoryRegistration(DmaBufMR(self._domain, n_bytes, access, fd, offset))

    def completion_queue(self, depth: int) -> CompletionQueue:
        """Make an empty completion queue."""
        return CompletionQueue(self._context, depth)

    def queue_pair(self, queue: CompletionQueue, depth: int, *, extended: bool = True) -> QueuePair:
        """Make a queue pair for `depth` operations, which all complete into `queue`.

        Args:
            queue: for completions, also of announcements of the other end.
            depth: operations posted and not completed.
            extended: post without an object per operation, where the driver can.
        """
        cap = QPCap(max_send_wr=depth, max_recv_wr=RECEIVES, max_send_sge=1, max_recv_sge=1)
        cq = queue.handle
        if extended:
            init = QPInitAttrEx(
                qp_type=_e.IBV_QPT_RC,
                scq=cq,
                rcq=cq,
                cap=cap,
                pd=self._domain,
                comp_mask=_e.IBV_QP_INIT_ATTR_PD | _e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                send_ops_flags=_e.IBV_QP_EX_WITH_RDMA_WRITE
                | _e.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
                | _e.IBV_QP_EX_WITH_RDMA_READ,
            )
            with contextlib.suppress(_PyverbsError):  # an older driver
                return QueuePair(QPEx(self._context, init), extended=True)
        with _translated("making a queue pair"):
            plain = QPInitAttr(qp_type=_e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap)
            return QueuePair(QP(self._domain, plain), extended=False)

    def close(self) -> None:
        """Close the device; all that was made of it is closed already."""
        with _translated("closing a device"), _channels:
            self._domain.close()
            self._context.close()


def _access(*, writable: bool, remote: bool) -> int:
    """Return the access flags of registered memory."""
    access = _e.IBV_ACCESS_LOCAL_WRITE if writable else 0
    if remote:
        access |= _e.IBV_ACCESS_REMOTE_READ
        access |= _e.IBV_ACCESS_REMOTE_WRITE if writable else 0
    return int(access)


def _request(
    operation: RdmaOperation, opcode: Any, immediate: int = 0, *, is_reported: bool = True
) -> Any:
    request = SendWR(
        wr_id=operation.wr_id,
        opcode=opcode,
        num_sge=1,
        imm_data=immediate,
        sg=[SGE(operation.address, operation.length, operation.lkey)],
        send_flags=_e.IBV_SEND_SIGNALED if is_reported else 0,
    )
    request.set_wr_rdma(operation.rkey, operation.remote_address)
    return request


def _with_event_fd(make: Callable[[], T]) -> tuple[T, int]:
    """Make an object with an event channel, and find the channel's descriptor."""
    with _channels:
        before = _event_fds()
        made = make()
        fd = getattr(made, "fd", None)
        return made, int(fd) if fd is not None else (_event_fds() - before).pop()


def _event_fds() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if "infinibandevent" in target:
            found.add(int(entry.name))
    return found
