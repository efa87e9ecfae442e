"""The gateway over a real core: tries, tokens and endings, with workers that are only scripted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

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
    PrefillDone,
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
from halfmoon_testing.scheduling_inputs import a_landing, a_worker

PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-0")


class Script:
    """Replace the links to workers: keep the messages to them, and answer for them."""

    def __init__(self, *workers: str, **config: Any) -> None:
        self.told: list[tuple[WorkerId, Message]] = []
        self.n_lost = 0
        self.shell = Shell(Conductor(SchedulingConfig(**config)), FakeClock())
        self.gateway = CoreGateway(self.shell)
        self.shell.connect(self, self.gateway)
        for name in workers:
            self.shell.post(WorkerJoined(a_worker(name)))

    def send(self, worker_id: WorkerId, message: Message) -> None:
        self.told.append((worker_id, message))

    def refuse(self, worker_id: WorkerId, reason: str) -> None:
        raise AssertionError(reason)

    def say(self, worker: WorkerId, message: Any) -> None:
        self.shell.post(MessageReceived(worker, message))

    def last(self, kind: type[Any]) -> Any:
        return [message for _, message in self.told if isinstance(message, kind)][-1]

    def wait(self, seconds: float) -> None:
        self.shell.clock.advance(seconds)  # type: ignore[attr-defined]

    def reserve(self, rid: str) -> None:
        landing = a_landing("decode-0")
        self.say(DECODE, DecodeReserved(request_id=RequestId(rid), landing=landing, expires_s=60.0))

    def prefill(
        self, rid: str, token: int, n_cached: int = 0, times: PrefillTimes | None = None
    ) -> None:
        done = PrefillDone(
            request_id=RequestId(rid),
            first_token=token,
            finish="",
            n_cached=n_cached,
            queue_s=0.0,
            compute_s=0.0,
            drain_s=0.0,
            times=times,
        )
        self.say(PREFILL, done)

    def decode(self, rid: str, token: int, finish: str = "") -> bool:
        wanted = self.gateway.deliver(RequestId(rid), token, finish)
        if finish:
            self.shell.post(RequestFinished(RequestId(rid)))
        return wanted

    def lose(self, worker: WorkerId) -> None:
        """It dies, and is there again at once."""
        self.n_lost += 1
        self.shell.post(WorkerJoined(a_worker(worker, generation=1 + self.n_lost)))

    def settle(self) -> None:
        """Losses that come now are not of the same moment as those before."""
        self.wait(EVENT_S + 0.1)
        self.shell.post(Tick())


async def test_a_model_is_listed_from_the_moment_at_which_the_cluster_is_ready() -> None:
    script = Script(PREFILL)
    gateway = script.gateway
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
        listed.append((gateway.ready(), gateway.model is not None))
    assert listed == [(False, False), (True, True), (False, True), (False, True), (False, True)]


class Client:
    """One request, read in a task of its own."""

    def __init__(self, gateway: CoreGateway, request: GenerationRequest) -> None:
        self.events: list[TokenEvent] = []
        self.task = asyncio.create_task(self._read(gateway, request))

    async def _read(self, gateway: CoreGateway, request: GenerationRequest) -> list[int]:
        async for event in gateway.generate(request):
            self.events.append(event)
        return [event.token for event in self.events]


@asynccontextmanager
async def asking(script: Script, n_new: int = 5, **fields: Any) -> AsyncIterator[Client]:
    request = GenerationRequest(
        request_id="cmpl-1",
        prompt_token_ids=fields.pop("prompt", tuple(range(20))),
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_new_tokens=n_new, min_new_tokens=fields.pop("min_new", 0)),
        **fields,
    )
    client = Client(script.gateway, request)
    await asyncio.sleep(0)  # lets it ask
    yield client
    client.task.cancel()
    await asyncio.wait([client.task])


async def test_the_next_try_asks_for_the_rest_behind_what_was_delivered() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script, n_new=5, min_new=4) as client:
        script.reserve("cmpl-1")
        script.prefill("cmpl-1", 50)
        script.decode("cmpl-1", 51)
        script.lose(DECODE)
        asked = script.last(ReserveDecode)
        assert (asked.request_id, asked.n_tokens) == ("cmpl-1~2", 22)
        assert (asked.stopping.max_new_tokens, asked.stopping.min_new_tokens) == (3, 2)
        script.reserve("cmpl-1~2")
        start = script.last(StartPrefill)
        assert start.token_ids == (*range(20), 50, 51)
        assert start.n_prompt == 20
        script.prefill("cmpl-1~2", 52)
        script.decode("cmpl-1~2", 53)
        script.decode("cmpl-1~2", 54, "length")
        assert await client.task == [50, 51, 52, 53, 54]


async def test_tokens_of_a_try_that_was_given_up_do_not_reach_the_client() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script) as client:
        script.reserve("cmpl-1")
        script.prefill("cmpl-1", 50)
        script.lose(DECODE)
        assert not script.decode("cmpl-1", 66)
        script.reserve("cmpl-1~2")
        script.prefill("cmpl-1~2", 51)
        assert not script.decode("cmpl-1", 67, "stop")
        for token, finish in ((52, ""), (53, ""), (54, "length")):
            assert script.decode("cmpl-1~2", token, finish)
        assert await client.task == [50, 51, 52, 53, 54]


async def test_only_tries_without_a_token_count_towards_the_limit() -> None:
    script = Script("prefill-0", "decode-0", max_attempts=2)
    async with asking(script, n_new=50) as client:
        for attempt in range(1, 8):
            rid = "cmpl-1" if attempt == 1 else f"cmpl-1~{attempt}"
            script.reserve(rid)
            script.prefill(rid, attempt)
            failed = DecodeFailed(request_id=RequestId(rid), reason="preempted", retryable=True)
            script.say(DECODE, failed)
        for rid in ("cmpl-1~8", "cmpl-1~9"):
            script.reserve(rid)
            refused = PrefillFailed(request_id=RequestId(rid), reason="no", retryable=True)
            script.say(PREFILL, refused)
        with pytest.raises(GenerationFailed, match="2 tries in a row"):
            await client.task
        assert [event.token for event in client.events] == [1, 2, 3, 4, 5, 6, 7]


async def test_tries_that_made_room_for_another_tenant_count_towards_no_limit() -> None:
    script = Script("prefill-0", "decode-0", max_attempts=2)
    async with asking(script, n_new=2) as client:
        for attempt in range(1, 5):
            rid = RequestId("cmpl-1" if attempt == 1 else f"cmpl-1~{attempt}")
            script.reserve(rid)
            script.shell.post(RequestCancelled(rid))
            script.gateway.resubmit(Resubmit(rid, "it made room", counts=False))
        script.reserve("cmpl-1~5")
        refused = PrefillFailed(request_id=RequestId("cmpl-1~5"), reason="no", retryable=True)
        script.say(PREFILL, refused)
        script.reserve("cmpl-1~6")
        script.prefill("cmpl-1~6", 50)
        script.decode("cmpl-1~6", 51, "length")
        assert await client.task == [50, 51]


async def test_cached_tokens_are_told_of_the_first_token_whichever_try_brought_it() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script, n_new=3) as client:
        script.reserve("cmpl-1")
        script.lose(PREFILL)
        script.reserve("cmpl-1~2")
        script.prefill("cmpl-1~2", 7, n_cached=16)
        script.decode("cmpl-1~2", 8)
        script.lose(DECODE)
        script.reserve("cmpl-1~3")
        script.prefill("cmpl-1~3", 9, n_cached=16)
        script.decode("cmpl-1~3", 10, "length")
        await client.task
        assert [event.n_cached for event in client.events] == [16, 0, 0, 0]


async def test_a_client_that_leaves_cancels_its_latest_try() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script) as client:
        script.reserve("cmpl-1")
        script.prefill("cmpl-1", 50)
        script.lose(DECODE)
        script.reserve("cmpl-1~2")
        script.prefill("cmpl-1~2", 51)
        client.task.cancel()
        await asyncio.wait([client.task])
        assert script.told[-1] == (DECODE, Cancel(request_id=RequestId("cmpl-1~2")))
        assert not any(script.shell.core.n_requests.values())


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
    script.reserve("cmpl-1")
    script.prefill("cmpl-1", 7)
    assert (await first).token == 7
    sent = [7]

    def produce(n: int, rid: str = "cmpl-1") -> bool:
        wanted = False
        for _ in range(n):
            wanted = script.decode(rid, len(sent) + 10)
            sent.extend([len(sent) + 10] if wanted else [])
        return wanted

    assert produce(80)
    script.wait(2.0)
    assert produce(1), "the reader may be slow for a while"
    script.wait(2.0)
    assert produce(1)
    assert script.told[-1] == (DECODE, Cancel(request_id=RequestId("cmpl-1")))
    assert script.shell.core.phase_of(RequestId("cmpl-1")) is None
    assert not produce(5), "what it has computed meanwhile is not wanted"

    got = [7] + [(await anext(events)).token for _ in range(82)]
    rest = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    again = script.last(ReserveDecode)
    assert again.request_id != "cmpl-1"
    script.reserve(again.request_id)
    script.prefill(again.request_id, len(sent) + 10)
    got.append((await rest).token)
    assert got == [*sent, len(sent) + 10]
    await events.aclose()


async def test_a_finished_request_is_forgotten() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script, n_new=2) as client:
        script.reserve("cmpl-1")
        script.prefill("cmpl-1", 50)
        assert isinstance(script.told[-1][1], StartDecode)
        script.decode("cmpl-1", 51, "length")
        assert await client.task == [50, 51]
        assert not any(script.shell.core.n_requests.values())
        assert script.gateway.n_live == 0


async def test_nobody_there_is_unavailable_and_says_who_is_missing() -> None:
    script = Script("prefill-0")
    assert script.gateway.missing() == ["decode"]
    async with asking(script) as client:
        with pytest.raises(ServiceUnavailable, match="decode"):
            await client.task
    async with asking(Script()) as client:
        with pytest.raises(ServiceUnavailable):
            await client.task


async def test_what_decode_can_never_hold_is_too_long() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script) as client:
        never = DecodeRefused(request_id=RequestId("cmpl-1"), reason="of 9 pages", retryable=False)
        script.say(DECODE, never)
        with pytest.raises(ContextLengthExceeded, match="of 9 pages"):
            await client.task


async def test_a_refusal_once_tokens_are_out_is_a_failure() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script) as client:
        script.reserve("cmpl-1")
        script.prefill("cmpl-1", 50)
        script.shell.post(WorkerJoined(a_worker("decode-1")))
        no_room = DecodeLoad(
            n_running=1, n_reserved=0, context_tokens=9, free_pages=0, n_pages=64, step_s=0
        )
        script.say(WorkerId("decode-1"), no_room)
        script.shell.post(WorkerLost(DECODE, "killed"))
        script.wait(301.0)
        script.shell.post(Tick())
        with pytest.raises(GenerationFailed):
            await client.task
        assert [event.token for event in client.events] == [50]


async def test_a_stream_goes_on_when_the_last_worker_comes_back() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script, n_new=3) as client:
        script.reserve("cmpl-1")
        script.prefill("cmpl-1", 50)
        script.shell.post(WorkerLost(DECODE, "it answers no heartbeats"))
        script.shell.post(WorkerLost(PREFILL, "it answers no heartbeats"))
        script.wait(5.0)
        script.shell.post(Tick())
        script.shell.post(WorkerJoined(a_worker("prefill-0")))
        script.shell.post(WorkerJoined(a_worker("decode-0")))
        script.reserve("cmpl-1~2")
        assert script.last(StartPrefill).token_ids[-1] == 50
        script.prefill("cmpl-1~2", 51)
        script.decode("cmpl-1~2", 52, "length")
        assert await client.task == [50, 51, 52]


async def test_a_stream_ends_with_unavailable_when_no_worker_comes_back() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script) as client:
        script.reserve("cmpl-1")
        script.prefill("cmpl-1", 50)
        script.shell.post(WorkerLost(DECODE, "killed"))
        script.wait(10.0)
        script.shell.post(Tick())
        with pytest.raises(ServiceUnavailable) as caught:
            await client.task
        assert caught.value.retry_after_s
        assert [event.token for event in client.events] == [50]


async def test_admission_refuses_with_a_time_to_retry() -> None:
    script = Script("prefill-0", "decode-0", admission="early")
    async with asking(script, ttft_slo_s=1e-6) as client:
        with pytest.raises(ServerOverloaded) as caught:
            await client.task
        assert caught.value.retry_after_s and caught.value.retry_after_s > 0
        assert script.told == []


async def test_scores_reach_the_client_with_their_tokens_and_a_prompts_only_once() -> None:
    script = Script("prefill-0", "decode-0")
    first, second, prompt = TokenScore(-1.0, 2), TokenScore(-2.0, 3), (TokenScore(-3.0, 4),)

    def scored(rid: str, score: TokenScore) -> None:
        done = PrefillDone(
            request_id=RequestId(rid), first_token=0, finish="", n_cached=0, queue_s=0.0,
            compute_s=0.0, drain_s=0.0, score=score, prompt_scores=prompt,
        )  # fmt: skip
        script.gateway.note_scores(done)

    async with asking(script, n_new=4) as client:
        script.reserve("cmpl-1")
        scored("cmpl-1", first)
        script.prefill("cmpl-1", 70)
        script.gateway.deliver(RequestId("cmpl-1"), 71, "", score=second)
        script.lose(DECODE)
        script.reserve("cmpl-1~2")
        scored("cmpl-1~2", first)
        scored("cmpl-1", second)  # late, of the try that was given up
        script.prefill("cmpl-1~2", 72)
        script.decode("cmpl-1~2", 73, "length")
        await client.task
    assert [event.score for event in client.events] == [first, second, first, None]
    assert [event.prompt_scores for event in client.events] == [prompt, (), (), ()]


async def test_the_stages_of_a_first_token_add_up_to_the_time_from_arrival_to_delivery() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script) as client:
        script.wait(1.0)
        script.reserve("cmpl-1")
        script.wait(16.0)
        times = PrefillTimes(queue_s=1.5, fetch_s=2.5, compute_s=8.0, transfer_s=3.0)
        script.prefill("cmpl-1", 50, times=times)
        script.wait(32.0)
        script.decode("cmpl-1", 51, "stop")
        await client.task
    first, second = client.events
    assert first.stages == {
        "retry": 0.0,
        "place": 0.0,
        "reserve": 1.0,
        "messages": 1.0,
        "queue": 1.5,
        "fetch": 2.5,
        "prefill": 8.0,
        "transfer": 3.0,
    }
    assert second.stages is None


async def test_time_that_earlier_tries_took_is_a_stage_of_its_own() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script) as client:
        script.wait(1.0)
        script.reserve("cmpl-1")
        script.wait(4.0)
        script.lose(PREFILL)
        script.wait(2.0)
        script.reserve("cmpl-1")  # of the first try: late
        script.reserve("cmpl-1~2")
        script.wait(8.0)
        script.prefill("cmpl-1~2", 50)
        script.decode("cmpl-1~2", 51, "stop")
        await client.task
    stages = client.events[0].stages
    assert stages is not None
    assert {stage: s for stage, s in stages.items() if s} == {
        "retry": 5.0,
        "reserve": 2.0,
        "messages": 8.0,
    }


async def test_a_request_that_waits_for_room_waits_in_its_place_stage() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script) as client:
        script.wait(1.0)
        full = DecodeRefused(
            request_id=RequestId("cmpl-1"), reason="full", retryable=True, retry_after_s=2.0
        )
        script.say(DECODE, full)
        script.wait(2.0)
        script.shell.post(Tick())
        script.reserve("cmpl-1")
        script.prefill("cmpl-1", 50)
        script.decode("cmpl-1", 51, "stop")
        await client.task
    stages = client.events[0].stages
    assert stages is not None and stages["place"] == 3.0


# -- requests under which workers are lost -------------------------------------------------------


async def test_a_request_under_which_workers_are_lost_is_the_clients_error() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script, tenant="acme") as client:
        script.reserve("cmpl-1")
        for attempt in (2, 3):
            script.lose(PREFILL)
            script.settle()
            script.reserve(f"cmpl-1~{attempt}")
        n_told = len(script.told)
        with capture_logs() as logs:
            script.lose(PREFILL)
            script.settle()
        with pytest.raises(
            HarmfulRequest, match=r"3 workers .* prefill-0 \(start 1\), prefill-0"
        ) as error:
            await client.task
        assert (error.value.status, error.value.code) == (400, "harmful_request")
        assert not [m for _, m in script.told[n_told:] if not isinstance(m, Cancel)]
        (line,) = (one for one in logs if one["event"] == "harmful_request")
        assert (line["request_id"], line["tenant"]) == ("cmpl-1", "acme")
        assert line["workers"] == ["prefill-0"] * 3


async def test_it_is_so_though_prefill_brought_a_token_each_time() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script) as client:
        script.reserve("cmpl-1")
        script.prefill("cmpl-1", 50)
        for attempt in (2, 3):
            script.lose(DECODE)
            script.settle()
            script.reserve(f"cmpl-1~{attempt}")
            script.prefill(f"cmpl-1~{attempt}", 49 + attempt)
        script.lose(DECODE)
        script.settle()
        with pytest.raises(HarmfulRequest):
            await client.task
        assert [event.token for event in client.events] == [50, 51, 52]


async def test_a_token_from_decode_between_two_losses_lets_it_go_on() -> None:
    script = Script("prefill-0", "decode-0")
    async with asking(script, n_new=20) as client:
        for attempt in range(1, 6):
            rid = "cmpl-1" if attempt == 1 else f"cmpl-1~{attempt}"
            script.reserve(rid)
            script.prefill(rid, 50)
            script.decode(rid, 51)
            script.lose(DECODE)
        script.reserve("cmpl-1~6")
        script.prefill("cmpl-1~6", 52)
        script.decode("cmpl-1~6", 53, "stop")
        assert len(await client.task) == 12


async def test_a_line_about_a_request_has_no_ids_of_the_request_whose_task_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[dict[str, object]] = []

    def note(event: str, **fields: object) -> None:
        lines.append({"event": event, **fields, **structlog.contextvars.get_contextvars()})

    monkeypatch.setattr(shell, "log", SimpleNamespace(info=note, warning=note))
    script = Script("prefill-0", "decode-0", max_attempts=1)
    async with asking(script) as client:
        script.reserve("cmpl-1")
        with structlog.contextvars.bound_contextvars(http_request_id="another", tenant="eve"):
            script.shell.post(WorkerLost(PREFILL, "killed"))
        with pytest.raises(GenerationFailed):
            await client.task
    (line,) = lines
    assert (line["event"], line["request_id"]) == ("request_failed", "cmpl-1")
    assert not {"http_request_id", "tenant"} & line.keys()
