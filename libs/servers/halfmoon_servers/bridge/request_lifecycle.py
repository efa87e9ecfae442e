"""Follow each request at a bridged server, from its stream to its end, and answer conductors.

The stream of a request that one server computes goes on from its prefill to its last token. Tokens
behind the first one are kept until `start_decode`. At the decode server of a pair a stream begins
with `start_decode`, which names the KV to fetch.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import structlog

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    DecodeFailed,
    PrefillDone,
    PrefillFailed,
    PrefillTimes,
    Produced,
    Role,
    StartDecode,
    StartPrefill,
)
from halfmoon_protocol.sampling import Finish, Stopping
from halfmoon_runtime.clock import Clock
from halfmoon_servers.bridge.bridge_port import BridgePort
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


class RequestLifecycle:
    """Run the requests of one server, as their streams say."""

    def __init__(
        self,
        model: str,
        ports: Mapping[Role, BridgePort],
        requests: BridgedRequests,
        client: ServerClient,
        salts: ServerSalts,
        clock: Clock,
        cache: CacheView | None,
        releaser: PairReleaser,
    ) -> None:
        """Prepare to run requests; arguments as for `BridgedServer`."""
        self._model = model
        self._ports = ports
        self._requests = requests
        self._client = client
        self._salts = salts
        self._clock = clock
        self._cache = cache
        self._releaser = releaser
        #: True for one half of a prefill and decode pair.
        self.is_pair = not {"prefill", "decode"} <= ports.keys()
        #: Blocks at prefill servers that the decode server has not fetched yet.
        self._unfetched: dict[RequestId, dict[str, Any]] = {}
        #: First tokens that the prefill server of a pair chose, and that clients have.
        self._first_tokens: dict[RequestId, int] = {}
        self._starts: dict[RequestId, StartDecode] = {}
        self._streams: ServerStreams
        self._tasks: asyncio.TaskGroup

    def open(self, tasks: asyncio.TaskGroup, is_alive: Callable[[], Awaitable[bool]]) -> None:
        """Get ready for streams; arguments as for `BridgedServer.open`."""
        self._tasks = tasks
        self._streams = ServerStreams(self._client, self, tasks, is_alive)

    # -- starts ------------------------------------------------------------------------------

    def start_prefill(
        self, request: BridgedRequest, start: StartPrefill, layout: KvLayout | None
    ) -> None:
        """Have the server compute a prompt that has a reservation."""
        request_id = request.request_id
        request.phase = BridgedPhase.PREFILLING
        request.started_s = self._clock.now()
        request.token_ids = list(start.token_ids)
        request.stopping = start.stopping
        request.block_hashes, request.cache_salt = start.block_hashes, start.cache_salt
        if self._cache is not None and layout is not None:
            n_most = (len(start.token_ids) - 1) // layout.block_size
            n_blocks = min(n_most, self._cache.n_leading(start.block_hashes))
            request.n_cached = n_blocks * layout.block_size
            self._cache.n_expected_tokens += request.n_cached
            self._cache.on_started(request_id, start.block_hashes)
        call = GenerateCall(
            request_id=request_id,
            model=self._model,
            prompt_token_ids=start.token_ids,
            sampling=start.sampling,
            stopping=start.stopping,
            salt=self._salts.server_salt(start.cache_salt),
        )
        if self.is_pair:
            self._streams.prefill(request_id, call)
        else:
            self._streams.generate(request_id, call)

    def start_decode(self, request: BridgedRequest, start: StartDecode) -> None:
        """Pass on the tokens that were kept; in a pair, have the decode server fetch the KV."""
        if self.is_pair:
            self._start_pair_decode(request, start)
            return
        if request.phase is not BridgedPhase.PREFILLED:
            failure = StreamFailure("its prefill is not done", True)
            self.fail_decode(request.request_id, failure)
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
            self.fail_decode(request_id, StreamFailure(reason, False))
            return
        request.phase = BridgedPhase.DECODING
        request.started_s = self._clock.now()
        request.token_ids = [*start.history, start.first_token]
        self._first_tokens[request_id] = start.first_token
        self._starts[request_id] = start
        self._unfetched[request_id] = params
        self._streams.generate(request_id, self._pair_call(request, params))

    def _pair_call(self, request: BridgedRequest, params: dict[str, Any] | None) -> GenerateCall:
        """Return the call at the decode server; without `params` it computes the prompt itself."""
        start, stopping = self._starts[request.request_id], request.stopping
        assert stopping is not None, "a reservation states its end"
        tokens = start.history
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
        if usage is not None and usage.n_cached is not None and self._cache is not None:
            self._cache.n_reported_tokens += usage.n_cached
        request = self._requests.get(request_id)
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
        request = self._requests.get(request_id)
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
        request = self._requests.get(request_id)
        if request is None:
            return
        log.warning("server_failed", request_id=request_id, reason=failure.reason)
        if request.phase is BridgedPhase.PREFILLING:
            self.fail_prefill(request_id, failure)
        else:
            self.fail_decode(request_id, failure)

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
                self.fail_decode(request_id, StreamFailure("it ended with the first token", True))
                return False
            return True  # the client has this token from the prefill server
        self._requests.on_token(request, row, now)
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
        return request_id in self._requests

    def _go_on_alone(self, request: BridgedRequest, token: int) -> None:
        """Have the decode server compute the prompt: it chose another first token than prefill.

        The client has prefill's token, and no KV is there behind it.
        """
        start = self._starts[request.request_id]
        log.warning(
            "pair_differs", request_id=request.request_id, prefill=start.first_token, decode=token
        )
        self._streams.generate(request.request_id, self._pair_call(request, None))

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
        self._ports["prefill"].answers.put(request.request_id, done)
        self._end_prefill(request.request_id)

    def _produce(self, request: BridgedRequest, row: TokenRow) -> None:
        token, score, finish = row
        produced = Produced(request.request_id, token, finish)
        self._ports["decode"].answers.produce(produced, score)
        if finish:
            self._record_computed(request)
            self._forget(request.request_id)

    def _record_computed(self, request: BridgedRequest) -> None:
        """Record the blocks of a finished request, where the server does not tell of them."""
        if self._cache is not None and self._cache.is_guessed:
            self._cache.on_computed(request.token_ids, request.cache_salt)

    # -- ends --------------------------------------------------------------------------------

    def fail_prefill(self, request_id: RequestId, failure: StreamFailure) -> None:
        """Report a failed prefill; the reservation stays until the conductor cancels it."""
        failed = PrefillFailed(
            request_id=request_id,
            reason=failure.reason,
            retryable=failure.retryable,
            invalid=failure.invalid,
            code=failure.code,
        )
        self._ports["prefill"].answers.put(request_id, failed)
        self.drop_prefill(request_id)

    def fail_decode(self, request_id: RequestId, failure: StreamFailure) -> None:
        """Report a request that decode can't serve, and drop it."""
        side = self._ports.get("decode")
        if side is not None:
            failed = DecodeFailed(
                request_id=request_id,
                reason=failure.reason,
                retryable=failure.retryable,
                invalid=failure.invalid,
                culprit=side.info.worker_id,
                code=failure.code,
            )
            side.answers.put(request_id, failed)
        self.drop(request_id)

    def drop_prefill(self, request_id: RequestId) -> None:
        """Stop a prefill, and end its connection's right to it; the room stays reserved."""
        self._end_prefill(request_id)
        request = self._requests.get(request_id)
        if request is None or request.phase is not BridgedPhase.PREFILLING:
            return
        self._streams.stop(request_id)
        self._leave_cache(request_id)
        request.phase = BridgedPhase.RESERVED
        if "decode" not in self._ports:
            self._requests.remove(request_id)

    def drop(self, request_id: RequestId) -> None:
        """Stop a request at the server, and free all that it holds."""
        self._streams.stop(request_id)
        self._forget(request_id)

    def _end_prefill(self, request_id: RequestId) -> None:
        if (side := self._ports.get("prefill")) is not None:
            side.conductors.owners.remove(request_id)

    def _leave_cache(self, request_id: RequestId) -> None:
        if self._cache is not None:
            self._cache.on_over(request_id, self._clock.now())

    def _forget(self, request_id: RequestId) -> None:
        self._requests.remove(request_id)
        self._leave_cache(request_id)
        self._first_tokens.pop(request_id, None)
        self._starts.pop(request_id, None)
        if (params := self._unfetched.pop(request_id, None)) is not None:
            self._release(request_id, params)
        if (side := self._ports.get("decode")) is not None:
            side.conductors.owners.remove(request_id)

    def _release(self, request_id: RequestId, params: dict[str, Any]) -> None:
        self._tasks.create_task(self._releaser.release(request_id, self._model, params))


def _finish_of_first(token: int, stopping: Stopping) -> Finish:
    """Return why a request ends with its first token, of which a prefill server knows nothing.

    The prefill server of a pair is asked for one token, and says "length" for each.
    """
    if token in stopping.stop_token_ids:
        return "stop"
    return "length" if stopping.max_new_tokens == 1 else ""
