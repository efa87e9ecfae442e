"""Speak the worker protocol for one plain inference server.

A server that prefills and decodes is three workers of one `WorkerInfo.server`. Reservations are
promises of room in the server's cache, and landings are empty places: nothing is written to them.
`start_prefill` opens a stream at the server; its first token is `prefill_done`. The stream goes on,
and from `start_decode` its tokens are `tokens_produced`. `cancel` closes the stream.

One half of a prefill and decode pair is a prefill or a decode worker. The prefill server's answer
names the KV; it travels through the conductor, and the decode server fetches the KV by it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import (
    AnyMessage,
    Cancel,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    Hello,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    PrefillTimes,
    Produced,
    ReserveDecode,
    Role,
    SnapshotBlocks,
    StartDecode,
    StartPrefill,
    Unwelcome,
    WorkerInfo,
)
from halfmoon_protocol.regions import KEY_BYTES, Landing, Region
from halfmoon_protocol.sampling import Finish, Stopping
from halfmoon_runtime.channels.network import PeerId, Port
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.worker.conductor_connections import ConductorConnections
from halfmoon_runtime.worker.housekeeping import HousekeepingPace
from halfmoon_runtime.worker.message_loop import drop_unexpected
from halfmoon_servers.bridge.answer_queue import AnswerQueue
from halfmoon_servers.bridge.bridged_requests import (
    BridgedPhase,
    BridgedRequest,
    BridgedRequests,
    TokenRow,
)
from halfmoon_servers.bridge.cache_view import CacheView
from halfmoon_servers.bridge.pair_releaser import PairReleaser
from halfmoon_servers.bridge.server_streams import ServerStreams, StreamFailure
from halfmoon_servers.client.generate_call import GenerateCall, GeneratedTokens, PairPrefill
from halfmoon_servers.client.server_client import ServerClient
from halfmoon_servers.kv_events.server_salts import ServerSalts

log = structlog.get_logger()

#: Seconds that a reservation waits for its prefill, and a landing for its decode.
LANDING_S = 600.0
_NO_RESERVATION = "no room is held for it on this connection"


@dataclass
class BridgePort:
    """The port of one role of a bridged server."""

    port: Port
    info: WorkerInfo
    conductors: ConductorConnections = field(init=False)
    answers: AnswerQueue = field(init=False)

    def open(self, drop_request: Callable[[RequestId], None]) -> None:
        """Make what answers; `drop_request` is called for requests of a connection that is gone."""
        self.conductors = ConductorConnections(self.port, drop_request)
        self.answers = AnswerQueue(self.conductors)


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
        self._model = model
        self.ports = ports
        self.requests = requests
        self._client = client
        self._salts = salts
        self._clock = clock
        self.cache = cache
        self._releaser = releaser
        #: Blocks at prefill servers that the decode server has not fetched yet.
        self._unfetched: dict[RequestId, dict[str, Any]] = {}
        self._streams: ServerStreams
        self._tasks: asyncio.TaskGroup
        #: Between two reports.
        self.pace = HousekeepingPace()
        #: First tokens that the prefill server of a pair chose, and that clients have.
        self._first_tokens: dict[RequestId, int] = {}
        self._starts: dict[RequestId, StartDecode] = {}
        for role, side in ports.items():
            side.open(self._drop_prefill if role == "prefill" else self._drop)

    def open(self, tasks: asyncio.TaskGroup, is_alive: Callable[[], Awaitable[bool]]) -> None:
        """Start the tasks that send answers.

        Args:
            tasks: the parent of all tasks.
            is_alive: probes the server after a failure.
        """
        self._tasks = tasks
        self._streams = ServerStreams(self._client, self, tasks, is_alive)
        for role, side in self.ports.items():
            tasks.create_task(side.answers.run(), name=f"answers {role}")
        if self.cache is not None:
            tasks.create_task(self.cache.run(), name="cache")

    @property
    def _is_pair(self) -> bool:
        """True for one half of a prefill and decode pair."""
        return not {"prefill", "decode"} <= self.ports.keys()

    # -- commands ----------------------------------------------------------------------------

    async def handle(self, role: Role, peer: PeerId, message: AnyMessage) -> None:
        """Handle a message that came to the port of a role."""
        side = self.ports[role]
        match message:
            case Hello(conductor_id=conductor):
                await side.conductors.on_hello(conductor, peer, side.info)
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
                    self._drop(request_id)
            case Cancel(request_id=request_id) if role == "prefill":
                if side.conductors.owners.owner_of(request_id) in (None, peer):
                    self._drop_prefill(request_id)
                    side.answers.put_to(peer, PrefillStopped(request_id=request_id))
            case SnapshotBlocks() if self.cache is not None and role == "kvstore":
                side.answers.put_to(peer, self.cache.snapshot(message))
            case Cancel():
                pass
            case _:
                drop_unexpected(side.port, message)

    def _on_reserve(self, side: BridgePort, peer: PeerId, message: ReserveDecode) -> None:
        request_id, n_tokens = message.request_id, message.n_tokens
        if side.info.draining:
            reason = f"{side.info.worker_id} is stopping: use another one"
            refused = DecodeRefused(request_id=request_id, reason=reason, retryable=True)
            side.answers.put_to(peer, refused)
            return
        if request_id in self.requests:
            reason = f"a request {request_id!r} is here: take another id"
            refused = DecodeRefused(request_id=request_id, reason=reason, retryable=True)
            side.answers.put_to(peer, refused)
            return
        refusal = self.requests.refusal(
            n_tokens, message.stopping.max_new_tokens, side.info.max_context
        )
        if refusal is not None:
            refused = DecodeRefused(
                request_id=request_id, reason=refusal.reason, retryable=refusal.retryable
            )
            side.answers.put_to(peer, refused)
            return
        request = self.requests.add(request_id, n_tokens, self._clock.now() + LANDING_S)
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
        if owner is not None:
            return  # a duplicate, or another connection's: the first one stands
        side.conductors.owners.add(request_id, peer)
        request = self.requests.get(request_id)
        if request is None and self._is_pair:
            request = self.requests.add(
                request_id, len(start.token_ids), self._clock.now() + LANDING_S
            )
        if request is None or request.phase is not BridgedPhase.RESERVED:
            self._fail_prefill(request_id, StreamFailure(_NO_RESERVATION, True))
            return
        if len(start.token_ids) != request.n_tokens:
            reason = f"{len(start.token_ids)} tokens to prefill, {request.n_tokens} reserved"
            self._fail_prefill(request_id, StreamFailure(reason, False))
            return
        request.phase = BridgedPhase.PREFILLING
        request.started_s = self._clock.now()
        request.token_ids = list(start.token_ids)
        request.stopping = start.stopping
        request.block_hashes, request.cache_salt = start.block_hashes, start.cache_salt
        layout = side.info.layout
        if self.cache is not None and layout is not None:
            n_most = (len(start.token_ids) - 1) // layout.block_size
            n_blocks = min(n_most, self.cache.n_leading(start.block_hashes))
            request.n_cached = n_blocks * layout.block_size
            self.cache.n_expected_tokens += request.n_cached
            self.cache.on_started(request_id, start.block_hashes)
        call = GenerateCall(
            request_id=request_id,
            model=self._model,
            prompt_token_ids=start.token_ids,
            sampling=start.sampling,
            stopping=start.stopping,
            salt=self._salts.server_salt(start.cache_salt),
        )
        if self._is_pair:
            self._streams.prefill(request_id, call)
        else:
            self._streams.generate(request_id, call)

    def _on_start_decode(self, side: BridgePort, peer: PeerId, start: StartDecode) -> None:
        request_id = start.request_id
        request = self.requests.get(request_id)
        if request is None or side.conductors.owners.owner_of(request_id) != peer:
            failed = DecodeFailed(request_id=request_id, reason=_NO_RESERVATION, retryable=True)
            side.answers.put_to(peer, failed)
            return
        if request.phase is BridgedPhase.DECODING:
            return  # a duplicate
        if self._is_pair:
            self._start_pair_decode(request, start)
            return
        if request.phase is not BridgedPhase.PREFILLED:
            self._fail_decode(request_id, StreamFailure("its prefill is not done", True))
            return
        request.phase = BridgedPhase.DECODING
        kept, request.kept = request.kept, []
        for row in kept:
            self._produce(request, row)

    def _start_pair_decode(self, request: BridgedRequest, start: StartDecode) -> None:
        """Have the decode server of a pair fetch the KV, and go on."""
        request_id = request.request_id
        try:
            params: Any = msgspec.json.decode(start.kv_transfer_params or "null")
        except (msgspec.DecodeError, RecursionError):
            params = None
        if not isinstance(params, dict) or len(start.history) != request.n_tokens:
            reason = "start_decode names no KV to fetch, or not the prompt that was reserved"
            self._fail_decode(request_id, StreamFailure(reason, False))
            return
        request.phase = BridgedPhase.DECODING
        request.started_s = self._clock.now()
        request.token_ids = [*start.history, start.first_token]
        self._first_tokens[request_id] = start.first_token
        self._starts[request_id] = start
        self._unfetched[request_id] = params
        self._streams.generate(request_id, self._pair_call(start, params))

    def _pair_call(self, start: StartDecode, params: dict[str, Any] | None) -> GenerateCall:
        """Return the call at the decode server; without `params` it computes the prompt itself."""
        stopping, tokens = start.stopping, start.history
        if params is None:
            tokens = (*start.history, start.first_token)
            stopping = msgspec.structs.replace(
                stopping,
                max_new_tokens=stopping.max_new_tokens - 1,
                min_new_tokens=max(0, stopping.min_new_tokens - 1),
            )
        return GenerateCall(
            request_id=start.request_id,
            model=self._model,
            prompt_token_ids=tokens,
            sampling=start.sampling,
            stopping=stopping,
            salt=self._salts.server_salt(start.cache_salt),
            kv_transfer_params=params,
        )

    # -- what the server sends: see `StreamListener` -----------------------------------------

    def on_piece(self, request_id: RequestId, piece: GeneratedTokens) -> None:
        """Pass tokens on, and learn from the usage at the end."""
        usage = piece.usage
        if usage is not None and usage.n_cached is not None and self.cache is not None:
            self.cache.n_reported_tokens += usage.n_cached
        request = self.requests.get(request_id)
        if request is None:
            return
        now = self._clock.now()
        for i, token in enumerate(piece.token_ids):
            score = piece.scores[i] if i < len(piece.scores) else None
            finish: Finish = piece.finish if i == len(piece.token_ids) - 1 else ""
            if not self._on_token(request, (token, score, finish), now):
                return
        if piece.finish and not piece.token_ids:
            failure = StreamFailure("it stopped without telling the stop token", True)
            self.on_failure(request_id, failure)

    def on_pair_prefill(self, request_id: RequestId, prefill: PairPrefill) -> None:
        """Report the end of a prompt at the prefill server of a pair."""
        request = self.requests.get(request_id)
        if request is None:  # cancelled meanwhile
            self._release(request_id, dict(prefill.kv_transfer_params))
            return
        params = msgspec.json.encode(prefill.kv_transfer_params).decode()
        (token,) = prefill.first.token_ids
        score = prefill.first.scores[0] if prefill.first.scores else None
        assert request.stopping is not None, "a prefill states its end"
        finish = _finish_of_first(token, request.stopping)
        self._prefill_done(request, (token, score, finish), params)
        if finish:  # no decode server comes
            self._release(request_id, dict(prefill.kv_transfer_params))
        self._forget(request_id)

    def on_failure(self, request_id: RequestId, failure: StreamFailure) -> None:
        """Report a request that the server did not finish."""
        request = self.requests.get(request_id)
        if request is None:
            return
        log.warning("server_failed", request_id=request_id, reason=failure.reason)
        if request.phase is BridgedPhase.PREFILLING:
            self._fail_prefill(request_id, failure)
        else:
            self._fail_decode(request_id, failure)

    def _on_token(self, request: BridgedRequest, row: TokenRow, now: float) -> bool:
        """Take one token; return whether further ones of this stream are wanted."""
        request_id = request.request_id
        self._unfetched.pop(request_id, None)
        expected = self._first_tokens.pop(request_id, None)
        if expected is not None:
            if row[0] != expected:
                self._go_on_alone(request, row[0])
                return False
            if row[2]:
                # The prefill server's answer did not say so, and the client waits for an end.
                self._fail_decode(request_id, StreamFailure("it ended with the first token", True))
                return False
            return True  # the client has this token from the prefill server
        self.requests.on_token(request, row, now)
        match request.phase:
            case BridgedPhase.PREFILLING:
                self._prefill_done(request, row, "")
                if row[2]:
                    self._record_computed(request)
            case BridgedPhase.PREFILLED:
                request.kept.append(row)
            case BridgedPhase.DECODING:
                self._produce(request, row)
            case BridgedPhase.RESERVED:
                raise AssertionError("a request without a prefill has no stream")
        return request_id in self.requests

    def _go_on_alone(self, request: BridgedRequest, token: int) -> None:
        """Have the decode server compute the prompt: it chose another first token than prefill.

        The client has prefill's token, and no KV is there behind it.
        """
        start = self._starts[request.request_id]
        log.warning(
            "pair_differs", request_id=request.request_id, prefill=start.first_token, decode=token
        )
        self._streams.generate(request.request_id, self._pair_call(start, None))

    def _prefill_done(self, request: BridgedRequest, row: TokenRow, params: str) -> None:
        token, score, finish = row
        request.phase = BridgedPhase.PREFILLED
        seconds = self._clock.now() - request.started_s
        done = PrefillDone(
            request_id=request.request_id,
            first_token=token,
            finish=finish,
            n_cached=request.n_cached,
            queue_s=0.0,
            compute_s=seconds,
            drain_s=0.0,
            score=score,
            # How long of it the request waited in the server's own queue is not known.
            times=PrefillTimes(queue_s=0.0, fetch_s=0.0, compute_s=seconds, transfer_s=0.0),
            kv_transfer_params=params,
        )
        self.ports["prefill"].answers.put(request.request_id, done)
        self._end_prefill(request.request_id)

    def _produce(self, request: BridgedRequest, row: TokenRow) -> None:
        token, score, finish = row
        produced = Produced(request.request_id, token, finish)
        self.ports["decode"].answers.produce(produced, score)
        if finish:
            self._record_computed(request)
            self._forget(request.request_id)

    def _record_computed(self, request: BridgedRequest) -> None:
        """Record the blocks of a finished request, where the server does not tell of them."""
        if self.cache is not None and self.cache.is_guessed:
            self.cache.on_computed(request.token_ids, request.cache_salt)

    # -- ends --------------------------------------------------------------------------------

    def _fail_prefill(self, request_id: RequestId, failure: StreamFailure) -> None:
        """Report a failed prefill; the reservation stays until the conductor cancels it."""
        failed = PrefillFailed(
            request_id=request_id,
            reason=failure.reason,
            retryable=failure.retryable,
            invalid=failure.invalid,
        )
        self.ports["prefill"].answers.put(request_id, failed)
        self._drop_prefill(request_id)

    def _fail_decode(self, request_id: RequestId, failure: StreamFailure) -> None:
        side = self.ports.get("decode")
        if side is not None:
            failed = DecodeFailed(
                request_id=request_id,
                reason=failure.reason,
                retryable=failure.retryable,
                invalid=failure.invalid,
                culprit=side.info.worker_id,
            )
            side.answers.put(request_id, failed)
        self._drop(request_id)

    def _drop_prefill(self, request_id: RequestId) -> None:
        """Stop a prefill, and end its connection's right to it; the room stays reserved."""
        self._end_prefill(request_id)
        request = self.requests.get(request_id)
        if request is None or request.phase is not BridgedPhase.PREFILLING:
            return
        self._streams.stop(request_id)
        self._leave_cache(request_id)
        request.phase = BridgedPhase.RESERVED
        if "decode" not in self.ports:
            self.requests.remove(request_id)

    def _end_prefill(self, request_id: RequestId) -> None:
        if (side := self.ports.get("prefill")) is not None:
            side.conductors.owners.remove(request_id)

    def _drop(self, request_id: RequestId) -> None:
        """Stop a request at the server, and free all that it holds."""
        self._streams.stop(request_id)
        self._forget(request_id)

    def _leave_cache(self, request_id: RequestId) -> None:
        if self.cache is not None:
            self.cache.on_over(request_id, self._clock.now())

    def _forget(self, request_id: RequestId) -> None:
        self.requests.remove(request_id)
        self._leave_cache(request_id)
        self._first_tokens.pop(request_id, None)
        self._starts.pop(request_id, None)
        if (params := self._unfetched.pop(request_id, None)) is not None:
            self._release(request_id, params)
        if (side := self.ports.get("decode")) is not None:
            side.conductors.owners.remove(request_id)

    async def drain(self) -> None:
        """Tell all conductors that the workers take no new requests; wait for the present ones."""
        for side in self.ports.values():
            side.info = msgspec.structs.replace(side.info, draining=True)
            await side.conductors.broadcast_info(side.info)
        await self.requests.idle.wait()

    def _release(self, request_id: RequestId, params: dict[str, Any]) -> None:
        self._tasks.create_task(self._releaser.release(request_id, self._model, params))

    # -- as time passes ----------------------------------------------------------------------

    async def housekeep(self) -> None:
        """End reservations that expired, probe superseded connections, publish the loads."""
        now = self._clock.now()
        for request in self.requests.expired(now):
            reason = "its prefill did not start before the deadline"
            self._fail_decode(request.request_id, StreamFailure(reason, True))
        if self.cache is not None:
            self.cache.forget_over(now)
        for side in self.ports.values():
            await side.conductors.probe_superseded(side.info, now)
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


def _finish_of_first(token: int, stopping: Stopping) -> Finish:
    """Return why a request ends with its first token, of which a prefill server knows nothing.

    The prefill server of a pair is asked for one token, and says "length" for each.
    """
    if token in stopping.stop_token_ids and stopping.min_new_tokens <= 1:
        return "stop"
    return "length" if stopping.max_new_tokens == 1 else ""
