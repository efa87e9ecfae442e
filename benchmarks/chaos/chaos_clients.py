"""Send requests steadily from several clients, and hand each answer to the ledger."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import httpx

from benchmarks.chaos.answer_check import End, ReceivedAnswer
from benchmarks.chaos.chaos_cluster import CONDUCTORS, MODEL_NAME, ChaosCluster
from benchmarks.chaos.ledger import AskedRequest, ChaosLedger
from benchmarks.chaos.reference_answers import Question

#: Seconds in which every request ends; several tries, each behind a pause, take less.
BOUND_S = 90.0
_PAUSE_S = (0.0, 0.6)
#: Seconds of rest after an answer that was no success, so that clients don't only fail.
_REST_S = 0.5
#: Connections that a client makes for one stream with a key.
_MAX_CONNECTIONS = 6
#: Errors after which it goes on with its stream; 0: an event of the stream.
_RESUMED_STATUSES = (0, 429, 500, 503)


class ChaosClients:
    """All clients of one run."""

    def __init__(
        self, cluster: ChaosCluster, ledger: ChaosLedger, questions: Sequence[Question]
    ) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._questions = questions
        self._ends = asyncio.Event()
        self._n_asked = 0
        # A connection for each request: one that a killed conductor left can't be taken again.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=None, limits=limits)

    async def run(self, seed: int, n_clients: int) -> None:
        """Send requests until `end` is called, and wait for the last answers."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(n_clients):
                dice = random.Random(f"{seed} {number}")
                tasks.create_task(self._run_client(dice))

    def end(self) -> None:
        """Let each client end after its present request."""
        self._ends.set()

    async def ask_everything(self) -> None:
        """Ask each question once, at the conductors by turns; all services are up."""
        for number, question in enumerate(self._questions):
            body = _body(question, len(question.answer), streams=bool(number % 2))
            await self._ask([CONDUCTORS[number // 2 % 2]], question, body, None)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _run_client(self, dice: random.Random) -> None:
        while not self._ends.is_set():
            question = dice.choice(self._questions)
            n_tokens = dice.randint(1, len(question.answer))
            streams = dice.random() < 0.7
            cancels = streams and dice.random() < 0.1
            cancel_after = dice.randint(0, n_tokens) if cancels else None
            resumes = streams and dice.random() < 0.5
            conductors = dice.choices(CONDUCTORS, k=_MAX_CONNECTIONS if resumes else 1)
            body = _body(question, n_tokens, streams=streams)
            was_right = await self._ask(conductors, question, body, cancel_after)
            await asyncio.sleep(dice.uniform(*_PAUSE_S) + (0.0 if was_right else _REST_S))

    async def _ask(
        self,
        conductors: Sequence[str],
        question: Question,
        body: dict[str, Any],
        cancel_after: int | None,
    ) -> bool:
        """Ask the first conductor, and record the answer; return whether it was no failure.

        With several, the request has a key. The client goes on at the next one after a broken
        connection or an error, and after one that it breaks itself.
        """
        self._n_asked += 1
        right = question.answer[: body["max_tokens"]]
        asked = AskedRequest(self._n_asked, conductors[0], self._cluster.now_s(), right)
        headers = {} if len(conductors) == 1 else {"idempotency-key": uuid4().hex}
        tokens: list[int] = []
        arrivals_s: list[float] = []
        tried: list[str] = []
        for conductor in conductors:
            tried.append(conductor)
            url = self._cluster.url_of(conductor)
            answer = await self._receive(url, body, headers, tokens, arrivals_s, cancel_after)
            if not headers or not _is_resumed(answer):
                break
            cancel_after = None
            await asyncio.sleep(_REST_S)
        self._ledger.n_resumed += len(tried) - 1
        if body["stream"]:
            self._ledger.on_stream(asked.began_s, arrivals_s)
        now_s = self._cluster.now_s()
        was_down = any(self._cluster.down[each].meet(asked.began_s, now_s) for each in tried)
        self._ledger.on_answer(asked, answer, now_s, conductor_was_down=was_down)
        return answer.end in (End.DONE, End.CANCELLED)

    async def _receive(
        self,
        url: str,
        body: dict[str, Any],
        headers: dict[str, str],
        tokens: list[int],
        arrivals_s: list[float],
        cancel_after: int | None,
    ) -> ReceivedAnswer:
        """Add the tokens that come to `tokens`, and the moments of a stream's to `arrivals_s`.

        The last event's id is kept in `headers`, if it has a key.
        """

        def take(some: Sequence[int]) -> None:
            tokens.extend(some)
            arrivals_s.append(self._cluster.now_s())

        answer = ReceivedAnswer(End.SILENT)
        try:
            async with asyncio.timeout(BOUND_S):
                async with self._http.stream(
                    "POST", f"{url}/v1/completions", json=body, headers=headers
                ) as reply:
                    if reply.status_code != 200:
                        answer = _error(reply.status_code, await reply.aread())
                    elif body["stream"]:
                        answer = await _read_stream(reply, headers, tokens, take, cancel_after)
                    else:
                        answer = _whole(await reply.aread(), tokens)
        except TimeoutError:
            pass
        except httpx.HTTPError as error:
            answer = ReceivedAnswer(End.BROKEN, message=repr(first_cause(error)))
        return replace(answer, tokens=tuple(tokens))


def first_cause(error: BaseException) -> BaseException:
    """Return the error that began a chain: httpx's own does not say how a connection failed."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def _body(question: Question, n_tokens: int, *, streams: bool) -> dict[str, Any]:
    body = {
        "model": MODEL_NAME,
        "prompt": list(question.prompt),
        "max_tokens": n_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": streams,
    }
    return body | ({"stream_options": {"include_usage": True}} if streams else {})


async def _read_stream(
    reply: httpx.Response,
    headers: dict[str, str],
    tokens: Sequence[int],
    take: Callable[[Sequence[int]], None],
    cancel_after: int | None,
) -> ReceivedAnswer:
    """Read events, and let `take` add to `tokens`; a stream that just stops is a broken one."""
    n_counted, event_id = None, ""
    async for line in reply.aiter_lines():
        if line == "data: [DONE]":
            return ReceivedAnswer(End.DONE, n_counted=n_counted)
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            return _named(0, event["error"])
        if event.get("usage"):
            n_counted = int(event["usage"]["completion_tokens"])
        for choice in event["choices"]:
            if some := choice.get("token_ids"):
                take(some)
        if event_id:
            headers["last-event-id"] = event_id
        if cancel_after is not None and len(tokens) >= cancel_after:
            return ReceivedAnswer(End.CANCELLED)
    return ReceivedAnswer(End.BROKEN, message="the stream ended without [DONE]")


def _is_resumed(answer: ReceivedAnswer) -> bool:
    """Return whether a client with a key goes on after this end."""
    if answer.end is End.ERROR:
        return answer.status in _RESUMED_STATUSES
    return answer.end in (End.BROKEN, End.CANCELLED)


def _whole(content: bytes, tokens: list[int]) -> ReceivedAnswer:
    answer = json.loads(content)
    tokens += answer["choices"][0]["token_ids"]
    return ReceivedAnswer(End.DONE, n_counted=int(answer["usage"]["completion_tokens"]))


def _error(status: int, content: bytes) -> ReceivedAnswer:
    try:
        return _named(status, json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return ReceivedAnswer(End.ERROR, status=status, message=repr(content[:200]))


def _named(status: int, error: dict[str, Any]) -> ReceivedAnswer:
    code = str(error.get("code") or error.get("type") or "")
    return ReceivedAnswer(
        End.ERROR, status=status, code=code, message=str(error.get("message") or "")
    )
