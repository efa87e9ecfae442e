"""The gateway over a real core: tries, tokens and endings, with workers that are only scripted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest, TokenEvent
from halfmoon_conductor.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    HarmfulRequest,
    ServerOverloaded,
    ServiceUnavailable,
)
from halfmoon_conductor.generation.core_gateway import CoreGateway
from halfmoon_conductor.workers import shell
from halfmoon_conductor.workers.shell import Shell
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages import (
    Cancel,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    Message,
    PrefillFailed,
    PrefillTimes,
    ReserveDecode,
    StartDecode,
    StartPrefill,
)
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_runtime.clock import FakeClock
from halfmoon_scheduling.admission.loss_history import EVENT_S
from halfmoon_scheduling.commands import Resubmit
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    MessageReceived,
    RequestCancelled,
    RequestFinished,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_worker

PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-0")


def try_id(attempt: int) -> RequestId:
    return RequestId("cmpl-1" if attempt == 1 else f"cmpl-1~{attempt}")


class Script:
    """Replace the links to workers: keep the messages to them, and answer for them.

    Tries of the one request are named by their number.
    """

    def __init__(self, *workers: str, **config: Any) -> None:
        self.told: list[tuple[WorkerId, Message]] = []
        self.n_lost = 0
        self.clock = FakeClock()
        self.shell = Shell(Conductor(SchedulingConfig(**config)), self.clock)
        self.gateway = CoreGateway(self.shell)
        self.shell.connect(self, self.gateway)
        for name in workers:
            self.shell.post(WorkerJoined(a_worker(name)))
        #: What the client has read.
        self.events: list[TokenEvent] = []
        self.client: asyncio.Task[None]

    def ask(self, request: GenerationRequest) -> None:
        async def read() -> None:
            async for event in self.gateway.generate(request):
                self.events.append(event)

        self.client = asyncio.create_task(read())

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events]

    async def ended(self) -> list[int]:
        """Wait for the end of the answer, and return its tokens."""
        await self.client
        return self.tokens

    def send(self, worker_id: WorkerId, message: Message) -> None:
        self.told.append((worker_id, message))

    def refuse(self, worker_id: WorkerId, reason: str) -> None:
        raise AssertionError(reason)

    def say(self, worker: WorkerId, message: Any) -> None:
        self.shell.post(MessageReceived(worker, message))

    def last(self, kind: type[Any]) -> Any:
        return [message for _, message in self.told if isinstance(message, kind)][-1]

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def reserve(self, attempt: int = 1) -> None:
        landing = a_landing("decode-0")
        granted = DecodeReserved(request_id=try_id(attempt), landing=landing, expires_s=60.0)
        self.say(DECODE, granted)

    def prefill(self, token: int, attempt: int = 1, **fields: Any) -> None:
        done = a_prefill_done(try_id(attempt), compute_s=0.0)
        self.say(PREFILL, msgspec.structs.replace(done, first_token=token, **fields))

    def begin(self, token: int, attempt: int = 1) -> None:
        self.reserve(attempt)
        self.prefill(token, attempt)

    def fail_prefill(self, attempt: int) -> None:
        self.reserve(attempt)
        failed = PrefillFailed(request_id=try_id(attempt), reason="no", retryable=True)
        self.say(PREFILL, failed)

    def decode(self, token: int, finish: Any = "", attempt: int = 1, **fields: Any) -> bool:
        wanted = self.gateway.deliver(try_id(attempt), token, finish, **fields)
        if finish:
            self.shell.post(RequestFinished(try_id(attempt)))
        return wanted

    def lose(self, worker: WorkerId) -> None:
        """It dies, and is there again at once."""
        self.n_lost += 1
        self.shell.post(WorkerJoined(a_worker(worker, generation=1 + self.n_lost)))

    def settle(self) -> None:
        """Losses that come now are not of the same moment as those before."""
        self.tick(EVENT_S + 0.1)

    def tick(self, after_s: float) -> None:
        self.wait(after_s)
        self.shell.post(Tick())


async def test_a_model_is_listed_from_the_moment_at_which_the_cluster_is_ready() -> None:
    script = Script(PREFILL)
    listed = []
    for event in (
        None,
        WorkerJoined(a_worker(DECODE)),
        WorkerLost(DECODE, "gone"),
        WorkerLost(PREFILL, "gone"),
        WorkerJoined(a_worker("kvstore-0")),
    ):
        if event is not None:
            script.shell.post(event)
        listed.append((script.gateway.ready(), script.gateway.model is not None))
    assert listed == [(False, False), (True, True), (False, True), (False, True), (False, True)]


@asynccontextmanager
async def asked(
    n_new: int = 5,
    min_new: int = 0,
    workers: tuple[str, ...] = (PREFILL, DECODE),
    request: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Script]:
    """Have one request of 20 tokens."""
    script = Script(*workers, **config)
    made = GenerationRequest(
        request_id="cmpl-1",
        prompt_token_ids=tuple(range(20)),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_new_tokens=n_new, min_new_tokens=min_new),
        **(request or {}),
    )
    script.ask(made)
    await asyncio.sleep(0)  # lets it ask
    yield script
    script.client.cancel()
    await asyncio.wait([script.client])


async def test_the_next_try_asks_for_the_rest_behind_what_was_delivered() -> None:
    async with asked(n_new=5, min_new=4) as at:
        at.begin(50)
        at.decode(51)
        at.lose(DECODE)
        again = at.last(ReserveDecode)
        assert (again.request_id, again.n_tokens) == ("cmpl-1~2", 22)
        assert (again.stopping.max_new_tokens, again.stopping.min_new_tokens) == (3, 2)
        at.reserve(2)
        start = at.last(StartPrefill)
        assert (start.token_ids, start.n_prompt) == ((*range(20), 50, 51), 20)
        at.prefill(52, 2)
        assert isinstance(at.told[-1][1], StartDecode)
        at.decode(53, attempt=2)
        at.decode(54, "length", 2)
        assert await at.ended() == [50, 51, 52, 53, 54]
        assert not any(at.shell.core.n_requests.values()), "it is forgotten"
        assert at.gateway.n_live == 0


async def test_tokens_of_a_try_that_was_given_up_do_not_reach_the_client() -> None:
    async with asked() as at:
        at.begin(50)
        at.lose(DECODE)
        assert not at.decode(66)
        at.begin(51, 2)
        assert not at.decode(67, "stop")
        for token, finish in ((52, ""), (53, ""), (54, "length")):
            assert at.decode(token, finish, 2)
        assert await at.ended() == [50, 51, 52, 53, 54]


async def test_only_tries_without_a_token_count_towards_the_limit() -> None:
    async with asked(n_new=50, max_attempts=2) as at:
        for attempt in range(1, 8):
            at.begin(attempt, attempt)
            rid = try_id(attempt)
            at.say(DECODE, DecodeFailed(request_id=rid, reason="preempted", retryable=True))
        at.fail_prefill(8)
        at.fail_prefill(9)
        with pytest.raises(GenerationFailed, match="2 tries in a row"):
            await at.client
        assert at.tokens == [1, 2, 3, 4, 5, 6, 7]


async def test_tries_that_made_room_for_another_tenant_count_towards_no_limit() -> None:
    async with asked(n_new=2, max_attempts=2) as at:
        for attempt in range(1, 5):
            at.reserve(attempt)
            at.shell.post(RequestCancelled(try_id(attempt)))
            at.gateway.resubmit(Resubmit(try_id(attempt), "it made room", counts=False))
        at.fail_prefill(5)
        at.begin(50, 6)
        at.decode(51, "length", 6)
        assert await at.ended() == [50, 51]


async def test_cached_tokens_are_told_of_the_first_token_whichever_try_brought_it() -> None:
    async with asked(n_new=3) as at:
        at.reserve()
        at.lose(PREFILL)
        at.reserve(2)
        at.prefill(7, 2, n_cached=16)
        at.decode(8, attempt=2)
        at.lose(DECODE)
        at.reserve(3)
        at.prefill(9, 3, n_cached=16)
        at.decode(10, "length", 3)
        await at.client
        assert [event.n_cached for event in at.events] == [16, 0, 0, 0]


async def test_a_client_that_leaves_cancels_its_latest_try() -> None:
    async with asked() as at:
        at.begin(50)
        at.lose(DECODE)
        at.begin(51, 2)
        at.client.cancel()
        await asyncio.wait([at.client])
        assert at.told[-1] == (DECODE, Cancel(request_id=try_id(2)))
        assert not any(at.shell.core.n_requests.values())


async def test_a_stream_whose_reader_takes_nothing_gives_its_place_away_and_goes_on_later() -> None:
    script = Script(PREFILL, DECODE)
    request = GenerationRequest(
        request_id="cmpl-1",
        prompt_token_ids=tuple(range(20)),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_new_tokens=200),
    )
    events = script.gateway.generate(request)
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    script.begin(7)
    assert (await first).token == 7
    sent = [7]

    def produce(n: int) -> bool:
        wanted = False
        for _ in range(n):
            wanted = script.decode(len(sent) + 10)
            sent.extend([len(sent) + 10] if wanted else [])
        return wanted

    assert produce(80)
    script.wait(2.0)
    assert produce(1), "the reader may be slow for a while"
    script.wait(2.0)
    assert produce(1)
    assert script.told[-1] == (DECODE, Cancel(request_id=try_id(1)))
    assert script.shell.core.phase_of(try_id(1)) is None
    assert not produce(5), "what it has computed meanwhile is not wanted"

    got = [7] + [(await anext(events)).token for _ in range(82)]
    rest = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    assert script.last(ReserveDecode).request_id == try_id(2)
    script.begin(len(sent) + 10, 2)
    got.append((await rest).token)
    assert got == [*sent, len(sent) + 10]
    await events.aclose()


async def test_nobody_there_is_unavailable_and_says_who_is_missing() -> None:
    async with asked(workers=(PREFILL,)) as at:
        assert at.gateway.missing() == ["decode"]
        with pytest.raises(ServiceUnavailable, match="decode"):
            await at.client
    async with asked(workers=()) as at:
        with pytest.raises(ServiceUnavailable):
            await at.client


async def test_what_decode_can_never_hold_is_too_long() -> None:
    async with asked() as at:
        at.say(DECODE, DecodeRefused(request_id=try_id(1), reason="of 9 pages", retryable=False))
        with pytest.raises(ContextLengthExceeded, match="of 9 pages"):
            await at.client


async def test_once_tokens_are_out_a_refusal_is_a_failure_and_a_lost_worker_unavailable() -> None:
    no_room = DecodeLoad(
        n_running=1, n_reserved=0, context_tokens=9, free_pages=0, n_pages=64, step_s=0
    )
    for other, kind in ((True, GenerationFailed), (False, ServiceUnavailable)):
        async with asked() as at:
            at.begin(50)
            if other:
                at.shell.post(WorkerJoined(a_worker("decode-1")))
                at.say(WorkerId("decode-1"), no_room)
            at.shell.post(WorkerLost(DECODE, "killed"))
            at.tick(301.0 if other else 10.0)
            with pytest.raises(kind) as caught:
                await at.client
            assert at.tokens == [50]
            assert other or caught.value.retry_after_s


async def test_a_stream_goes_on_when_the_last_worker_comes_back() -> None:
    async with asked(n_new=3) as at:
        at.begin(50)
        at.shell.post(WorkerLost(DECODE, "it answers no heartbeats"))
        at.shell.post(WorkerLost(PREFILL, "it answers no heartbeats"))
        at.tick(5.0)
        at.shell.post(WorkerJoined(a_worker(PREFILL)))
        at.shell.post(WorkerJoined(a_worker(DECODE)))
        at.reserve(2)
        assert at.last(StartPrefill).token_ids[-1] == 50
        at.prefill(51, 2)
        at.decode(52, "length", 2)
        assert await at.ended() == [50, 51, 52]


async def test_admission_refuses_with_a_time_to_retry() -> None:
    async with asked(admission="early", request={"ttft_slo_s": 1e-6}) as at:
        with pytest.raises(ServerOverloaded) as caught:
            await at.client
        assert caught.value.retry_after_s and caught.value.retry_after_s > 0
        assert at.told == []


async def test_scores_reach_the_client_with_their_tokens_and_a_prompts_only_once() -> None:
    first, second, prompt = TokenScore(-1.0, 2), TokenScore(-2.0, 3), (TokenScore(-3.0, 4),)

    async with asked(n_new=4) as at:

        def scored(attempt: int, score: TokenScore) -> None:
            done = a_prefill_done(try_id(attempt))
            at.gateway.note_scores(msgspec.structs.replace(done, score=score, prompt_scores=prompt))

        at.reserve()
        scored(1, first)
        at.prefill(70)
        at.decode(71, score=second)
        at.lose(DECODE)
        at.reserve(2)
        scored(2, first)
        scored(1, second)  # late, of the try that was given up
        at.prefill(72, 2)
        at.decode(73, "length", 2)
        await at.client
    assert [event.score for event in at.events] == [first, second, first, None]
    assert [event.prompt_scores for event in at.events] == [prompt, (), (), ()]


async def test_the_stages_of_a_first_token_add_up_to_the_time_from_arrival_to_delivery() -> None:
    async with asked() as at:
        at.wait(1.0)
        at.reserve()
        at.wait(16.0)
        times = PrefillTimes(queue_s=1.5, fetch_s=2.5, compute_s=8.0, transfer_s=3.0)
        at.prefill(50, times=times)
        at.wait(32.0)
        at.decode(51, "stop")
        await at.client
    first, second = at.events
    assert first.stages == {
        "retry": 0.0, "place": 0.0, "reserve": 1.0, "messages": 1.0,
        "queue": 1.5, "fetch": 2.5, "prefill": 8.0, "transfer": 3.0,
    }  # fmt: skip
    assert second.stages is None


async def test_time_that_earlier_tries_took_and_a_wait_for_room_are_stages_of_their_own() -> None:
    async with asked() as at:
        at.wait(1.0)
        at.reserve()
        at.wait(4.0)
        at.lose(PREFILL)
        at.wait(2.0)
        at.reserve(1)  # of the first try: late
        at.reserve(2)
        at.wait(8.0)
        at.prefill(50, 2)
        at.decode(51, "stop", 2)
        await at.client
    stages = at.events[0].stages or {}
    taken = {stage: s for stage, s in stages.items() if s}
    assert taken == {"retry": 5.0, "reserve": 2.0, "messages": 8.0}
    async with asked() as at:
        at.wait(1.0)
        full = DecodeRefused(request_id=try_id(1), reason="full", retryable=True, retry_after_s=2.0)
        at.say(DECODE, full)
        at.tick(2.0)
        at.begin(50)
        at.decode(51, "stop")
        await at.client
    assert (at.events[0].stages or {})["place"] == 3.0


# -- requests under which workers are lost -------------------------------------------------------


async def test_a_request_under_which_workers_are_lost_is_the_clients_error() -> None:
    async with asked(request={"tenant": "acme"}) as at:
        at.reserve()
        for attempt in (2, 3):
            at.lose(PREFILL)
            at.settle()
            at.reserve(attempt)
        n_told = len(at.told)
        with capture_logs() as logs:
            at.lose(PREFILL)
            at.settle()
        with pytest.raises(
            HarmfulRequest, match=r"3 workers .* prefill-0 \(start 1\), prefill-0"
        ) as error:
            await at.client
        assert (error.value.status, error.value.code) == (400, "harmful_request")
        assert not [m for _, m in at.told[n_told:] if not isinstance(m, Cancel)]
        (line,) = (one for one in logs if one["event"] == "harmful_request")
        assert (line["request_id"], line["tenant"]) == ("cmpl-1", "acme")
        assert line["workers"] == ["prefill-0"] * 3


async def test_it_is_so_though_prefill_brought_a_token_each_time() -> None:
    async with asked() as at:
        for attempt in (1, 2, 3):
            at.begin(49 + attempt, attempt)
            at.lose(DECODE)
            at.settle()
        with pytest.raises(HarmfulRequest):
            await at.client
        assert at.tokens == [50, 51, 52]


async def test_a_token_from_decode_between_two_losses_lets_it_go_on() -> None:
    async with asked(n_new=20) as at:
        for attempt in range(1, 6):
            at.begin(50, attempt)
            at.decode(51, attempt=attempt)
            at.lose(DECODE)
        at.begin(52, 6)
        at.decode(53, "stop", 6)
        assert len(await at.ended()) == 12


async def test_a_line_about_a_request_has_no_ids_of_the_request_whose_task_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[dict[str, object]] = []

    def note(event: str, **fields: object) -> None:
        lines.append({"event": event, **fields, **structlog.contextvars.get_contextvars()})

    monkeypatch.setattr(shell, "log", SimpleNamespace(info=note, warning=note))
    async with asked(max_attempts=1) as at:
        at.reserve()
        with structlog.contextvars.bound_contextvars(http_request_id="another", tenant="eve"):
            at.shell.post(WorkerLost(PREFILL, "killed"))
        with pytest.raises(GenerationFailed):
            await at.client
    (line,) = lines
    assert (line["event"], line["request_id"]) == ("request_failed", "cmpl-1")
    assert not {"http_request_id", "tenant"} & line.keys()
