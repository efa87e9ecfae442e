"""Speak the worker protocol for one plain inference server.

A server that prefills and decodes is three workers of one `WorkerInfo.server`. Reservations are
promises of room in the server's cache, and landings are empty places: nothing is written to them.
`start_prefill` opens a stream at the server; its first token is `prefill_done`. The stream goes on,
and from `start_decode` its tokens are `tokens_produced`. `cancel` closes the stream.

One half of a prefill and decode pair is a prefill or a decode worker. The prefill server's answer
names the KV; it travels through the conductor, and the decode server fetches the KV by it.

Commands are checked here; what a request then goes through is in `request_lifecycle`.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from halfmoon_protocol import error_codes
from halfmoon_protocol.messages import (
    AnyMessage,
    Cancel,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    Hello,
    Message,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    ReserveDecode,
    Role,
    SnapshotBlocks,
    StartDecode,
    StartPrefill,
    Unwelcome,
    WorkerInfo,
)
from halfmoon_protocol.regions import KEY_BYTES, Landing, Region
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.network import PeerId
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.worker.housekeeping import HousekeepingPace
from halfmoon_runtime.worker.message_loop import drop_unexpected
from halfmoon_servers.bridge.bridge_port import BridgePort
from halfmoon_servers.bridge.bridged_requests import BridgedPhase, BridgedRequests
from halfmoon_servers.bridge.cache_view import CacheView
from halfmoon_servers.bridge.pair_releaser import PairReleaser
from halfmoon_servers.bridge.request_lifecycle import RequestLifecycle
from halfmoon_servers.bridge.server_streams import StreamFailure
from halfmoon_servers.client.server_client import ServerClient
from halfmoon_servers.kv_events.server_salts import ServerSalts

#: Seconds that a reservation waits for its prefill, and a landing for its decode.
LANDING_S = 600.0
_NO_RESERVATION = "no room is held for it on this connection"


class BridgedServer:
    """The workers of one server, while it is up."""

    def __init__(
        self,
        model: str,
        ports: dict[Role, BridgePort],
        requests: BridgedRequests,
        client: ServerClient,
        salts: ServerSalts,
        clock: Clock,
        cache: CacheView | None,
        releaser: PairReleaser,
    ) -> None:
        """Prepare the workers; `open` starts them.

        Args:
            model: the name by which the server knows its model.
            ports: an open port for each role, with the role's record.
            requests: the requests at the server; none yet.
            client: reaches the server.
            salts: names salts as the server takes them.
            clock: tells the time.
            cache: what the server has cached; None for a decode server of a pair.
            releaser: frees blocks of prefill servers that no decode server fetches.
        """
        self.ports = ports
        self.requests = requests
        self._clock = clock
        self.cache = cache
        self._lifecycle = RequestLifecycle(
            model, ports, requests, client, salts, clock, cache, releaser
        )
        #: Between two reports.
        self.pace = HousekeepingPace()
        for role, side in ports.items():
            lifecycle = self._lifecycle
            side.open(lifecycle.drop_prefill if role == "prefill" else lifecycle.drop)

    def open(self, tasks: asyncio.TaskGroup, is_alive: Callable[[], Awaitable[bool]]) -> None:
        """Start the tasks that send answers.

        Args:
            tasks: the parent of all tasks.
            is_alive: probes the server after a failure.
        """
        self._lifecycle.open(tasks, is_alive)
        for role, side in self.ports.items():
            tasks.create_task(side.answers.run(), name=f"answers {role}")
        if self.cache is not None:
            tasks.create_task(self.cache.run(), name="cache")

    # -- commands ----------------------------------------------------------------------------

    async def handle(self, role: Role, peer: PeerId, message: AnyMessage) -> None:
        """Handle a message that came to the port of a role."""
        side = self.ports[role]
        match message:
            case Hello():
                await side.conductors.on_hello(message, peer, side.info)
            case Unwelcome(reason=reason):
                side.conductors.on_unwelcome(peer, reason)
            case ReserveDecode() if role == "decode":
                self._on_reserve(side, peer, message)
            case StartDecode() if role == "decode":
                self._on_start_decode(side, peer, message)
            case StartPrefill() if role == "prefill":
                self._on_start_prefill(side, peer, message)
            case Cancel(request_id=request_id) if role == "decode":
                if side.conductors.owners.owner_of(request_id) == peer:
                    self._lifecycle.drop(request_id)
            case Cancel(request_id=request_id) if role == "prefill":
                if side.conductors.owners.owner_of(request_id) in (None, peer):
                    self._lifecycle.drop_prefill(request_id)
                    side.answers.put_to(peer, PrefillStopped(request_id=request_id))
            case SnapshotBlocks() if self.cache is not None and role == "kvstore":
                for page in self.cache.snapshot(message):
                    side.answers.put_to(peer, page)
            case Cancel():
                pass
            case _:
                drop_unexpected(side.port, message)

    def _on_reserve(self, side: BridgePort, peer: PeerId, message: ReserveDecode) -> None:
        request_id, n_tokens = message.request_id, message.n_tokens
        if side.info.draining:
            reason = f"{side.info.worker_id} is stopping: use another one"
            refused = DecodeRefused(
                request_id=request_id, reason=reason, retryable=True, code=error_codes.DRAINING
            )
            side.answers.put_to(peer, refused)
            return
        if request_id in self.requests:
            if side.conductors.owners.owner_of(request_id) == peer:
                record_drop("duplicate", side.info.commands, f"ReserveDecode of {request_id}")
                return
            reason = f"a request {request_id!r} is here: take another id"
            refused = DecodeRefused(
                request_id=request_id, reason=reason, retryable=True, code=error_codes.ID_IN_USE
            )
            side.answers.put_to(peer, refused)
            return
        refusal = self.requests.refusal(
            n_tokens, message.stopping.max_new_tokens, side.info.max_context
        )
        if refusal is not None:
            refused = DecodeRefused(
                request_id=request_id,
                reason=refusal.reason,
                retryable=refusal.retryable,
                code=error_codes.NO_ROOM if refusal.retryable else error_codes.TOO_LONG,
            )
            side.answers.put_to(peer, refused)
            return
        until_s = self._clock.now() + LANDING_S
        request = self.requests.add(request_id, n_tokens, until_s, message.stopping)
        self.pace.wake()
        side.conductors.owners.add(request_id, peer)
        layout = side.info.layout
        assert layout is not None, "a bridge states a layout"
        info = side.info
        length = info.n_blocks * layout.block_bytes
        region = Region(info.worker_id, info.generation, bytes(KEY_BYTES), length)
        landing = Landing(region, tuple(range(request.n_pages)), layout)
        reserved = DecodeReserved(request_id=request_id, landing=landing, expires_s=LANDING_S)
        side.answers.put(request_id, reserved)

    def _on_start_prefill(self, side: BridgePort, peer: PeerId, start: StartPrefill) -> None:
        request_id = start.request_id
        owner = side.conductors.owners.owner_of(request_id)
        if owner == peer:
            record_drop("duplicate", side.info.commands, f"StartPrefill of {request_id}")
            return
        if owner is not None:
            reason = f"another connection has a request {request_id!r} here: take another id"
            failed = PrefillFailed(
                request_id=request_id, reason=reason, retryable=True, code=error_codes.ID_IN_USE
            )
            side.answers.put_to(peer, failed)
            return
        side.conductors.owners.add(request_id, peer)
        request = self.requests.get(request_id)
        if request is None and self._lifecycle.is_pair:
            request = self.requests.add(
                request_id, len(start.token_ids), self._clock.now() + LANDING_S
            )
        if request is None or request.phase is not BridgedPhase.RESERVED:
            self._lifecycle.fail_prefill(request_id, StreamFailure(_NO_RESERVATION, True))
            return
        if len(start.token_ids) != request.n_tokens:
            reason = f"{len(start.token_ids)} tokens to prefill, {request.n_tokens} reserved"
            self._lifecycle.fail_prefill(request_id, StreamFailure(reason, False))
            return
        self._lifecycle.start_prefill(request, start, side.info.layout)

    def _on_start_decode(self, side: BridgePort, peer: PeerId, start: StartDecode) -> None:
        request_id = start.request_id
        request = self.requests.get(request_id)
        if request is None or side.conductors.owners.owner_of(request_id) != peer:
            failed = DecodeFailed(
                request_id=request_id,
                reason=_NO_RESERVATION,
                retryable=True,
                code=error_codes.NOT_HELD,
            )
            side.answers.put_to(peer, failed)
            return
        if request.phase is BridgedPhase.DECODING:
            return  # a duplicate
        self._lifecycle.start_decode(request, start)

    # -- as time passes ----------------------------------------------------------------------

    async def drain(self) -> None:
        """Tell all conductors that the workers take no new requests; wait for the present ones."""
        for side in self.ports.values():
            side.info = msgspec.structs.replace(side.info, draining=True)
            await side.conductors.broadcast_info(side.info)
        await self.requests.idle.wait()

    async def housekeep(self) -> None:
        """End reservations that expired, probe connections, publish the loads."""
        now = self._clock.now()
        for request in self.requests.expired(now):
            reason = "its prefill did not start before the deadline"
            self._lifecycle.fail_decode(request.request_id, StreamFailure(reason, True))
        if self.cache is not None:
            self.cache.forget_over(now)
        for side in self.ports.values():
            await side.conductors.probe(side.info, now)
            await side.port.publish(self._load(side.info))

    def _load(self, info: WorkerInfo) -> Message:
        requests = self.requests
        if info.role == "kvstore":
            assert self.cache is not None
            return self.cache.load()
        if info.role == "prefill":
            return PrefillLoad(
                n_queued=requests.count(BridgedPhase.PREFILLING),
                queued_tokens=requests.queued_tokens,
                free_pages=requests.free_pages,
                n_pages=info.n_blocks,
            )
        return DecodeLoad(
            n_running=requests.count(BridgedPhase.DECODING),
            n_reserved=len(requests) - requests.count(BridgedPhase.DECODING),
            context_tokens=requests.context_tokens,
            free_pages=requests.free_pages,
            n_pages=info.n_blocks,
            step_s=requests.step_s,
        )
