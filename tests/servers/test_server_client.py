"""The client turns a server's answers into tokens, and each failure into its own error."""

import asyncio
import socket
from typing import Any

import pytest

from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_servers.client.generate_call import (
    GenerateCall,
    GeneratedTokens,
    PairPrefill,
    ServerUsage,
)
from halfmoon_servers.client.server_client import MAX_RETRY_AFTER_S, ClientLimits, ServerClient
from halfmoon_servers.client.server_description import ReportedLoad
from halfmoon_servers.client.server_errors import (
    AnswerBroken,
    NotServable,
    ServerGarbage,
    ServerGone,
    ServerRefused,
    ServerTooSlow,
)
from halfmoon_servers.kv_events.event_endpoint import EventEndpoint
from tests.servers.scripted_server import Handler, ReceivedRequest, ScriptedServer

COMPLETIONS = "/v1/completions"
AT_LEAST = Stopping(max_new_tokens=9, stop_token_ids=(2,), min_new_tokens=2)
SGLANG = {"data": [{"id": "tiny", "owned_by": "sglang", "max_model_len": 512}]}


def call(sampling: Sampling | None = None, **fields: Any) -> GenerateCall:
    return GenerateCall(
        **{
            "request_id": "cmpl-1",
            "model": "tiny",
            "prompt_token_ids": (1, 2, 3),
            "sampling": sampling or Sampling(temperature=0),
            "stopping": Stopping(max_new_tokens=5, stop_token_ids=(9,)),
            **fields,
        }
    )


async def answer(server: ScriptedServer, request: GenerateCall) -> list[GeneratedTokens]:
    await server.client.describe()
    return [piece async for piece in server.client.generate(request)]


def be_sglang(server: ScriptedServer, version: str = "0.5.6", **info: Any) -> None:
    server.on("/v1/models", SGLANG)
    server.on("/get_server_info", {"version": version, **info})


def chunk(tokens: list[int], finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": tokens, "text": "x", "finish_reason": finish, **fields}]}


def answering(body: bytes, status: int, headers: str = "") -> Handler:
    return lambda request: request.answer(body, status=status, headers=headers)


def breaking(*events: Any) -> Handler:
    """Answer with these events, and close the connection in the middle."""

    async def handler(request: ReceivedRequest) -> None:
        await request.begin_stream()
        for event in events:
            await request.event(event)
        request.abort()

    return handler


def streamed(*events: Any) -> Handler:
    async def handler(request: ReceivedRequest) -> None:
        await request.begin_stream()
        for event in events:
            await request.event(event)
        await request.end_stream()

    return handler


async def test_a_server_is_described_by_models_metrics_and_sources(server: ScriptedServer) -> None:
    assert (await server.client.describe()).event_endpoints == (), "an older one has none"
    source = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv"}
    server.on("/kv_event_sources", {"0": {**source, "publisher": "zmq"}})
    seen = await server.client.describe()
    assert (seen.kind, seen.version) == ("vllm", "0.32.0")
    assert (seen.model, seen.model_root) == ("tiny", "/models/tiny")
    assert (seen.max_model_len, seen.block_size, seen.n_blocks) == (512, 32, 201)
    endpoint = EventEndpoint("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv", 0)
    assert seen.event_endpoints == (endpoint,)
    server.on("/kv_event_sources", {})
    assert (await server.client.describe()).event_endpoints == ()


async def test_sglang_is_described_by_its_server_info(server: ScriptedServer) -> None:
    events = '{"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}'
    info: dict[str, Any] = {"page_size": 64, "max_total_num_tokens": 6400, "dp_size": 2}
    be_sglang(server, **info, kv_events_config=events)
    seen = await server.client.describe()
    assert (seen.kind, seen.version, seen.block_size, seen.n_blocks) == ("sglang", "0.5.6", 64, 100)
    endpoints = [each.endpoint for each in seen.event_endpoints]
    assert endpoints == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", b"{"),
        ("/v1/models", b'{"data":[]}'),
        ("/v1/models", b'{"data":[{"id":"tiny"}]}'),
        ("/v1/models", b'{"data":' + b"[" * 50_000),
        ("/v1/models", b" " * 200_000),
        ("/version", b'{"version":7}'),
        ("/kv_event_sources", b'{"0":{"endpoint":"ipc:///etc/x"}}'),
        ("/kv_event_sources", b'{"0":{"endpoint":"tcp://*:99999"}}'),
        ("/metrics", b"vllm:cache_config_info{ oops\n"),
        ("/metrics", b"vllm:cache_config_info{} 1\n" * 3800),
    ],
)
async def test_a_broken_description_is_garbage(
    server: ScriptedServer, path: str, body: bytes
) -> None:
    server.on(path, body)
    if path == "/metrics" and len(body) > 1000:
        server.on(path, body + b"vllm:cache_config_info{} 1\n" * 300)
    with pytest.raises(ServerGarbage, match=server.url):
        await server.client.describe()


async def test_load_adds_up_the_ranks_and_skips_what_is_no_number(server: ScriptedServer) -> None:
    page = (
        b"# HELP vllm:num_requests_running x\n"
        b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
        b'vllm:num_requests_waiting{engine="0"} 5.0\nvllm:num_requests_waiting{engine="1"} NaN\n'
        b'vllm:num_requests_waiting_by_reason{reason="x"} 50.0\n'
        b'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
        b"garbage in a line of no use {{{\n"
    )
    server.on("/metrics", page)
    assert await server.client.load() == ReportedLoad(7, 5, 0.5)
    server.on("/metrics", b"sglang:num_running_reqs{} 1\nsglang:token_usage{} 7\n")
    assert await server.client.load() == ReportedLoad(1, 0, 1.0)
    server.on("/metrics", b"up 1\n")
    with pytest.raises(ServerGarbage, match="no metric"):
        await server.client.load()


async def test_tokens_come_with_scores_finish_and_usage(server: ScriptedServer) -> None:
    first = {
        "tokens": ["token_id:7", "token_id:8"],
        "token_logprobs": [-1.0, -0.5],
        "top_logprobs": [
            {"token_id:7": -1.0, "token_id:4": -0.25, "token_id:5": -0.75},
            {"token_id:8": -0.5, "token_id:3": -2.0},
        ],
    }
    last = {"token_logprobs": [-1.5], "top_logprobs": [{"token_id:9": -1.5}]}
    details = {"cached_tokens": 2}
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": details}
    end = {"choices": [], "usage": usage}
    request = call(Sampling(temperature=0, logprobs=2))
    begun = chunk([7, 8], logprobs=first, prompt_token_ids=[1, 2, 3])
    server.on(COMPLETIONS, streamed(begun, b": a comment\n\n", end))
    with pytest.raises(AnswerBroken, match="without a finish_reason"):
        await answer(server, request)
    server.on(COMPLETIONS, streamed(begun, chunk([9], "stop", logprobs=last), end))
    seven, eight = TokenScore(-1.0, 3, ((4, -0.25), (5, -0.75))), ((8, -0.5), (3, -2.0))
    assert await answer(server, request) == [
        GeneratedTokens((7, 8), (seven, TokenScore(-0.5, 1, eight))),
        GeneratedTokens((9,), (TokenScore(-1.5, 1, ((9, -1.5),)),), "stop"),
        GeneratedTokens((), usage=ServerUsage(3, 3, 2)),
    ]


async def test_events_cut_anywhere_are_the_same_events(server: ScriptedServer) -> None:
    text = b'data: {"choices":[{"token_ids":[7]}]}\r\n\r\ndata: [DONE]\n\n'
    text = text.replace(b"[7]}", b'[7],"finish_reason":"length"}')

    async def handler(request: ReceivedRequest) -> None:
        await request.begin_stream()
        for index in range(len(text)):
            await request.event(text[index : index + 1])
        await request.write(b"0\r\n\r\n")

    server.on(COMPLETIONS, handler)
    assert await answer(server, call()) == [GeneratedTokens((7,), finish="length")]


async def test_the_body_names_all_that_the_request_asks(server: ScriptedServer) -> None:
    server.on(COMPLETIONS, streamed(chunk([9], "stop")))
    sampling = Sampling(
        temperature=0.5, top_k=4, seed=11, logit_bias=((3, -1.5),),
        grammar='start: %json {"type": "object", "x-guidance": {"whitespace_pattern": "x"}}',
    )  # fmt: skip
    await answer(server, call(sampling, salt="lab\x1f", kv_transfer_params={"a": [1]}))
    request = server.received[-1]
    assert request.headers["x-request-id"] == "cmpl-1"
    assert request.json == {
        "model": "tiny", "prompt": [1, 2, 3], "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
        "max_tokens": 5, "min_tokens": 0, "stop_token_ids": [9], "ignore_eos": True,
        "skip_special_tokens": False, "temperature": 0.5, "top_p": 1.0, "top_k": 4, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "logit_bias": {"3": -1.5}, "seed": 11,
        "structured_outputs": {"json": {"type": "object"}}, "cache_salt": "lab\x1f",
        "kv_transfer_params": {"a": [1]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"sampling": Sampling(prompt_logprobs=1)}, "vllm", "prompt_logprobs"),
        ({"sampling": Sampling(grammar="start: /a+/")}, "vllm", "grammar"),
        ({"sampling": Sampling(grammar="start: %json {} \nx: %json {}")}, "vllm", "grammar"),
        ({"sampling": Sampling(repetition_penalty=3)}, "sglang", "repetition_penalty"),
        (
            {"sampling": Sampling(grammar="start: %json {}"), "stopping": AT_LEAST},
            "vllm",
            "min_tokens",
        ),
        ({"salt": "lab"}, "sglang", "cache_salt"),
        ({"kv_transfer_params": {}}, "sglang", "kv_transfer_params"),
        ({"kv_transfer_params": {"remote_num_tokens": 2}}, "vllm", "kv_transfer_params"),
    ],
)
async def test_what_a_server_can_not_do_is_refused_before_anything_is_sent(
    server: ScriptedServer, fields: dict[str, Any], kind: str, field: str
) -> None:
    if kind == "sglang":
        be_sglang(server, "0.4.9")
    await server.client.describe()
    n_received = len(server.received)
    with pytest.raises(NotServable, match=field) as caught:
        await answer(server, call(**fields))
    assert caught.value.field == field
    assert not [each for each in server.received[n_received:] if each.method == "POST"]


STOPPED = {"type": "stop", "matched": 9}


def _sglang(ids: list[int], total: int, finish: Any = None, **meta: Any) -> dict[str, Any]:
    info = {"prompt_tokens": 3, "completion_tokens": total, "cached_tokens": 1}
    return {"output_ids": ids, "meta_info": {**info, "finish_reason": finish, **meta}}


@pytest.mark.parametrize(
    "events",
    [
        [_sglang([7], 1), _sglang([7, 8], 2), _sglang([7, 8, 9], 3, STOPPED)],
        [_sglang([7], 1), _sglang([8], 2), _sglang([9], 3, STOPPED)],
        [_sglang([7], 1), _sglang([7, 8], 2), _sglang([], 3, STOPPED)],
    ],
    ids=["all tokens so far", "new tokens", "stop token cut off"],
)
async def test_sglang_answers_in_its_own_format(server: ScriptedServer, events: list[Any]) -> None:
    be_sglang(server)
    server.on("/generate", streamed(*events))
    pieces = await answer(server, call(salt="lab"))
    assert [token for piece in pieces for token in piece.token_ids] == [7, 8, 9]
    assert (pieces[-1].finish, pieces[-1].usage) == ("stop", ServerUsage(3, 3, 1))
    body = server.received[-1].json
    assert (body["input_ids"], body["rid"], body["extra_key"]) == ([1, 2, 3], "cmpl-1", "lab")
    assert body["sampling_params"]["stop_token_ids"] == [9]


async def test_scores_of_sglang_are_those_of_the_new_tokens(server: ScriptedServer) -> None:
    be_sglang(server)
    own, top = [[-0.5, 7, None], [-2.0, 8, None]], [[[-0.5, 7, None]], [[-0.1, 4, None]]]

    def scored(n: int, finish: Any = None) -> dict[str, Any]:
        scores = {"output_token_logprobs": own[:n], "output_top_logprobs": top[:n]}
        return _sglang([7, 8][:n], n, finish, **scores)

    server.on("/generate", streamed(scored(1), scored(2, {"type": "length"})))
    pieces = await answer(server, call(Sampling(temperature=0, logprobs=1)))
    assert [piece.scores for piece in pieces] == [
        (TokenScore(-0.5, 1, ((7, -0.5),)),),
        (TokenScore(-2.0, 2, ((4, -0.1),)),),
    ]


@pytest.mark.parametrize(
    "event",
    [
        b"data: {\n\n",
        b"data: " + b"[" * 5000 + b"\n\n",
        b"data: " + b"x" * 20_000 + b"\n\n",
        b"x" * 20_000,
        chunk([-1]),
        chunk([2**32]),
        {"choices": [{"text": "no token ids"}]},
        {"choices": [{"token_ids": [1]}, {"token_ids": [2]}]},
        chunk([1], logprobs={"token_logprobs": []}),
        chunk([1], logprobs={"token_logprobs": [None]}),
        chunk([1], logprobs={"token_logprobs": [-1], "top_logprobs": [{"a": -1}]}),
        chunk([1], logprobs={"token_logprobs": [-1], "top_logprobs": [{"token_id:x": -1}]}),
    ],
)
async def test_an_answer_that_is_none_is_named_garbage(server: ScriptedServer, event: Any) -> None:
    server.on(COMPLETIONS, streamed(event, chunk([9], "stop")))
    with pytest.raises(ServerGarbage, match=server.url):
        await answer(server, call(Sampling(temperature=0, logprobs=1)))


async def test_a_connection_that_breaks_at_the_end_costs_nothing(server: ScriptedServer) -> None:
    server.on(COMPLETIONS, breaking(chunk([9], "stop")))
    assert await answer(server, call()) == [GeneratedTokens((9,), finish="stop")]


async def abort(request: ReceivedRequest) -> None:
    request.abort()


@pytest.mark.parametrize(
    ("handler", "error", "words", "tokens"),
    [
        *(
            (streamed(chunk([7], reason)), AnswerBroken, reason, [])
            for reason in ("abort", "error", "repetition")
        ),
        (breaking(chunk([7])), AnswerBroken, "", [7]),
        (abort, ServerGone, "", []),
        (
            streamed({"error": {"message": "no room", "code": 503}}),
            ServerRefused,
            "503: no room",
            [],
        ),
    ],
    ids=["aborted", "failed", "repeated", "killed in mid stream", "closed before", "refused"],
)
async def test_an_answer_that_ends_early_says_why_behind_its_last_token(
    server: ScriptedServer, handler: Handler, error: Any, words: str, tokens: list[int]
) -> None:
    server.on(COMPLETIONS, handler)
    await server.client.describe()
    pieces: list[int] = []
    with pytest.raises(error, match=words) as caught:
        async for piece in server.client.generate(call()):
            pieces += piece.token_ids
    assert pieces[: len(tokens)] == tokens
    assert error is not ServerRefused or caught.value.retryable


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"bad prompt","code":400}}', "bad prompt"),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b'{"message":"bad"}', "bad"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b"<html>proxy</html>", "<html>proxy</html>"),
        (b"", "no message"),
        (b"[" * 50_000, "[[["),
    ],
)
async def test_a_refusal_has_its_message(server: ScriptedServer, body: bytes, message: str) -> None:
    server.on(COMPLETIONS, answering(body, 400))
    with pytest.raises(ServerRefused) as caught:
        await answer(server, call())
    assert message in str(caught.value) and len(str(caught.value)) < 1200
    assert caught.value.invalid and not caught.value.retryable


@pytest.mark.parametrize(
    ("header", "most"),
    [("2", 2.0), ("1e9", MAX_RETRY_AFTER_S), ("Fri, 31 Dec 2999 23:59:59 GMT", MAX_RETRY_AFTER_S)],
)
async def test_a_server_is_left_alone_as_asked(
    server: ScriptedServer, header: str, most: float
) -> None:
    server.on(COMPLETIONS, answering(b"", 503, f"retry-after: {header}\r\n"))
    with pytest.raises(ServerRefused) as caught:
        await answer(server, call())
    assert caught.value.retry_after_s == most
    n_received = len(server.received)
    with pytest.raises(ServerRefused) as again:
        await anext(server.client.generate(call()))
    assert again.value.status == 503 and 0 < (again.value.retry_after_s or 0) <= most
    assert len(server.received) == n_received


@pytest.mark.parametrize("header", ["soon", "nan", "-3", "Fri, 31 Dec 1999 23:59:59 GMT"])
async def test_a_broken_wait_keeps_no_request_back(server: ScriptedServer, header: str) -> None:
    server.on(COMPLETIONS, answering(b"", 503, f"retry-after: {header}\r\n"))
    for _ in range(2):
        with pytest.raises(ServerRefused):
            await answer(server, call())
    assert [each.path for each in server.received].count(COMPLETIONS) == 2


async def test_a_server_that_is_not_there_is_gone() -> None:
    async with ServerClient("http://127.0.0.1:9") as client:
        with pytest.raises(ServerGone, match=r"127\.0\.0\.1:9"):
            await client.describe()
        assert not await client.healthy()


@pytest.mark.parametrize("begins", [True, False])
async def test_a_server_that_says_nothing_is_too_slow(server: ScriptedServer, begins: bool) -> None:
    async def handler(request: ReceivedRequest) -> None:
        if begins:
            await request.begin_stream()
            await request.event(chunk([7]))
        await request.until_left()

    server.on(COMPLETIONS, handler)
    limits = ClientLimits(first_byte_timeout_s=0.2, idle_timeout_s=0.2)
    async with ServerClient(server.url, limits=limits) as server.client:
        with pytest.raises(ServerTooSlow, match=r"within 0\.2 s"):
            await answer(server, call())


async def test_a_server_that_accepts_no_connection_is_gone() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        with socket.socket() as queued:
            queued.setblocking(False)
            await loop.sock_connect(queued, address)  # takes the only place in the queue
            limits = ClientLimits(connect_timeout_s=0.2)
            async with ServerClient(f"http://127.0.0.1:{address[1]}", limits=limits) as client:
                with pytest.raises(ServerGone, match=r"no connection within 0\.2 s"):
                    await client.describe()


async def test_a_client_that_leaves_closes_the_connection(server: ScriptedServer) -> None:
    left = asyncio.Event()

    async def handler(request: ReceivedRequest) -> None:
        await request.begin_stream()
        await request.event(chunk([7]))
        await request.until_left()
        left.set()

    server.on(COMPLETIONS, handler)
    await server.client.describe()
    stream = server.client.generate(call())
    await anext(stream)
    await stream.aclose()
    await asyncio.wait_for(left.wait(), 30)


async def test_answers_that_were_read_leave_their_connection(server: ScriptedServer) -> None:
    server.on(COMPLETIONS, streamed(chunk([9], "stop")))
    await answer(server, call())
    n_connections = server.n_connections
    for _ in range(3):
        await answer(server, call())
    assert server.n_connections == n_connections


async def test_an_endless_answer_to_a_description_is_cut_off(server: ScriptedServer) -> None:
    async def handler(request: ReceivedRequest) -> None:
        await request.begin_stream()
        while not request.writer.is_closing():
            await request.event(b"x" * 50_000)

    server.on("/v1/models", handler)
    with pytest.raises(ServerGarbage, match="over 100000 bytes"):
        await server.client.describe()


async def test_the_first_leg_of_a_pair_returns_what_the_second_sends(
    server: ScriptedServer,
) -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "h"}
    choice = {"text": "x", "token_ids": [7], "finish_reason": "length"}
    answer = {"choices": [choice], "usage": None, "kv_transfer_params": params}
    server.on(COMPLETIONS, answer)
    await server.client.describe()
    found = await server.client.pair_prefill(call())
    assert found == PairPrefill(params, GeneratedTokens((7,), finish="length"))
    body = server.received[-1].json
    assert (body["max_tokens"], body["min_tokens"], body["stream"]) == (1, 0, False)
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    assert "stream_options" not in body
    wrong: dict[str, Any]
    for wrong in (
        {"choices": []},
        {"kv_transfer_params": 7},
        {"kv_transfer_params": {}},
        {"choices": [], "kv_transfer_params": params},
        {"choices": [{**choice, "token_ids": [7, 8]}], "kv_transfer_params": params},
    ):
        server.on(COMPLETIONS, wrong)
        with pytest.raises(ServerGarbage, match=r"kv_transfer_params|not one token"):
            await server.client.pair_prefill(call())


async def test_blocks_are_released_by_a_request_that_is_refused(server: ScriptedServer) -> None:
    server.on(COMPLETIONS, answering(b"no", 400))
    await server.client.release_pair_prefill(call(kv_transfer_params={"remote_request_id": "r"}))
    body = server.received[-1].json
    assert (body["stream"], body["use_beam_search"]) == (True, True)
    assert body["kv_transfer_params"] == {"remote_request_id": "r"}
    wrong: tuple[tuple[int, type[Exception]], ...] = ((500, ServerRefused), (200, ServerGarbage))
    for status, error in wrong:
        server.on(COMPLETIONS, answering(b"no", status))
        with pytest.raises(error):
            await server.client.release_pair_prefill(call(kv_transfer_params={}))
