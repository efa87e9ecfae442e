"""What a client reads when all is well."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.observability.metrics.ttft_stages import TTFT_STAGES
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.nightly import by_day

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "The moon 🌗 is half 半月 full."
PROMPT = {"model": "lab/moon", "prompt": "Say it"}
HELLO = {"model": "lab/moon", "messages": [{"role": "user", "content": "Hello"}]}
Events = Callable[[str], list[Any]]


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_completion_is_answered_whole(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    gateway.n_cached = 1
    answer = await post(client, COMPLETIONS, {**PROMPT, "max_tokens": 100})
    n_prompt = len(tokenizer.encode("Say it", add_special_tokens=True))
    n_new = len(gateway.script)
    assert answer.pop("id") == gateway.requests[0].request_id
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "lab/moon",
        "system_fingerprint": "fp_0123456789ab",
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_new,
            "total_tokens": n_prompt + n_new,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


async def test_a_chat_is_answered_whole(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    answer = await post(client, CHAT, HELLO)
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = tokenizer.decode(gateway.requests[0].prompt_token_ids)
    assert prompt == "user:Helloassistant:"
    assert gateway.requests[0].prompt_token_ids[0] == 1  # <|turn|>
    assert gateway.requests[0].request_id.startswith("chatcmpl-")


async def test_a_streamed_completion_says_the_same_text_in_pieces(
    client: httpx.AsyncClient, events_of: Events
) -> None:
    response = await client.post(COMPLETIONS, json={**PROMPT, "max_tokens": 100, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, last = events_of(response.text)
    assert last == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 1
    )
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(chunks) > 5
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, HELLO)])
async def test_each_event_says_what_computed_it_also_once_that_has_changed(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    events_of: Events,
    path: str,
    body: dict[str, Any],
) -> None:
    for fingerprint in ("fp_0123456789ab", "fp_ba9876543210"):
        assert gateway.card is not None
        gateway.card = msgspec.structs.replace(gateway.card, fingerprint=fingerprint)
        response = await client.post(path, json={**body, "stream": True})
        *chunks, _ = events_of(response.text)
        assert {chunk["system_fingerprint"] for chunk in chunks} == {fingerprint}


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_an_empty_delta(
    client: httpx.AsyncClient, events_of: Events
) -> None:
    response = await client.post(CHAT, json={**HELLO, "stream": True})
    *chunks, last = events_of(response.text)
    assert last == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == TEXT
    assert all(delta["content"] for delta in deltas[1:-1])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, HELLO)])
async def test_a_stream_that_is_to_include_usage_ends_with_it(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    events_of: Events,
    path: str,
    body: dict[str, Any],
) -> None:
    gateway.n_cached = 3
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4}
    response = await client.post(path, json={**body, **options})
    *chunks, usage, last = events_of(response.text)
    assert last == "[DONE]"
    assert usage["choices"] == []
    n_prompt = len(gateway.requests[0].prompt_token_ids)
    assert usage["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": 4,
        "total_tokens": n_prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_cuts_the_answer_and_ends_the_generation(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    body = {**PROMPT, "max_tokens": 100, "stop": ["半月", " nowhere"]}
    answer = await post(client, COMPLETIONS, body)
    assert answer["choices"][0]["text"] == "The moon 🌗 is half "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert gateway.n_said < len(gateway.script)
    assert answer["usage"]["completion_tokens"] == gateway.n_said
    assert gateway.cancelled == [gateway.requests[0].request_id]


async def test_what_may_begin_a_stop_string_is_said_when_it_was_none(
    client: httpx.AsyncClient, events_of: Events
) -> None:
    body = {**PROMPT, "max_tokens": 100, "stop": "full.!", "stream": True}
    response = await client.post(COMPLETIONS, json=body)
    chunks = events_of(response.text)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT


async def test_every_parameter_reaches_the_gateway(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    body = {
        **PROMPT,
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 11,
        "stop_token_ids": [8, 0],
        "min_tokens": 2,
        "cache_salt": "tenant",
        "ttft_slo_s": 1.5,
        "tbt_slo_s": 0.1,
        "user": "me",
    }
    await post(client, COMPLETIONS, body)
    request = gateway.requests[0]
    assert request.prompt_token_ids == (5, 6, 7)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, -0.3)
    assert sampling.seed == 11
    assert request.stopping.max_new_tokens == 9
    assert request.stopping.stop_token_ids == (0, 8)
    assert request.stopping.min_new_tokens == 2
    assert (request.salt, request.ttft_slo_s, request.tbt_slo_s) == ("\x1ftenant", 1.5, 0.1)


async def test_what_is_left_out_or_null_has_openais_defaults(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    body: dict[str, Any] = {
        **PROMPT,
        "n": 1,
        "echo": False,
        "logprobs": None,
        "logit_bias": {},
        "stop": None,
    }
    await post(client, COMPLETIONS, body)
    await post(client, COMPLETIONS, PROMPT)
    first, second = gateway.requests
    assert first.stopping.max_new_tokens == 16
    assert first.stopping.stop_token_ids == (0,)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (1, 1, 0)
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id != second.request_id
    assert first.salt == ""


async def test_seeds_and_extremes_fit_what_workers_take(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    await post(client, COMPLETIONS, {**PROMPT, "seed": -1, "top_k": -1, "temperature": 1e-9})
    sampling = gateway.requests[0].sampling
    assert sampling.seed == 2**63 - 1
    assert sampling.top_k == 0
    assert sampling.temperature == 0


async def test_an_answer_goes_on_after_an_end_token_when_it_is_ignored(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    n_new = 2 * len(gateway.script)
    body = {**PROMPT, "max_tokens": n_new, "ignore_eos": True}
    answer = await post(client, COMPLETIONS, body)
    assert answer["choices"][0] == {
        "index": 0, "text": TEXT + TEXT, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip


@pytest.mark.parametrize("prompt", ["Say it", ["Say it"], [70, 71], [[70, 71]]])
async def test_a_prompt_has_many_forms(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer, prompt: Any
) -> None:
    await post(client, COMPLETIONS, {**PROMPT, "prompt": prompt})
    text = "Say it" in (prompt, prompt[0])
    expected = tokenizer.encode("Say it", add_special_tokens=True) if text else [70, 71]
    assert list(gateway.requests[0].prompt_token_ids) == expected


async def test_a_chat_gets_the_rest_of_the_context_and_a_completion_no_more_than_that(
    client: httpx.AsyncClient, gateway: ScriptedGateway, card: ModelCard
) -> None:
    gateway.script = [70]
    answer = await post(client, CHAT, HELLO)
    assert answer["usage"]["total_tokens"] == card.max_context
    prompt = [70] * (card.max_context - 3)
    answer = await post(client, COMPLETIONS, {**PROMPT, "prompt": prompt})
    assert answer["usage"]["completion_tokens"] == 3


async def test_parts_of_a_content_are_joined_and_an_old_turn_is_taken_back(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answered: dict[str, Any] = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "tool_calls": [],
    }
    messages = [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": parts},
        answered,
        {"role": "user", "content": "more", "name": "me"},
    ]
    await post(client, CHAT, {**HELLO, "messages": messages, "add_generation_prompt": False})
    prompt = tokenizer.decode(gateway.requests[0].prompt_token_ids)
    assert prompt == "system:briefuser:one\ntwoassistant:yesuser:more"


async def test_a_request_keeps_its_id_or_gets_one(client: httpx.AsyncClient) -> None:
    answer = await client.get("/health", headers={"x-request-id": "trace-7"})
    assert answer.headers["x-request-id"] == "trace-7"
    for unusable in ("", "a b", "x" * 200):
        answer = await client.get("/health", headers={"x-request-id": unusable})
        assert answer.headers["x-request-id"].startswith("req-")


async def test_models_are_listed_once_a_worker_has_joined(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    described = {
        "id": "lab/moon",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "halfmoon",
        "max_model_len": 200,
        "default_sampling_params": {},
    }
    answer = await client.get("/v1/models")
    assert answer.json() == {"object": "list", "data": [described]}
    assert (await client.get("/v1/models/lab/moon")).json() == described
    gateway.card = None
    assert (await client.get("/v1/models")).json()["data"] == []


async def test_readiness_says_who_is_missing(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "missing": []})
    gateway.roles_missing = ["decode"]
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "missing": ["decode"]})
    assert (await client.get("/health")).status_code == 200


async def test_metrics_count_requests_and_tokens(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.n_cached = 2
    await post(client, COMPLETIONS, {**PROMPT, "prompt": [70, 71, 72], "max_tokens": 5})
    await post(client, COMPLETIONS, {**PROMPT, "prompt": [70, 71, 72], "max_tokens": 100})
    await client.get("/nowhere/1")
    await client.get("/nowhere/2")
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    n_new = 5 + len(gateway.script)
    for line in (
        'halfmoon_http_requests_total{route="/v1/completions",status="200"} 2.0',
        'halfmoon_http_requests_total{route="unmatched",status="404"} 2.0',
        "halfmoon_prompt_tokens_total 6.0",
        "halfmoon_prompt_tokens_cached_total 4.0",
        f"halfmoon_generation_tokens_total {float(n_new)}",
        'halfmoon_request_success_total{finished_reason="length"} 1.0',
        'halfmoon_request_success_total{finished_reason="stop"} 1.0',
        "halfmoon_time_to_first_token_seconds_count 2.0",
        f"halfmoon_inter_token_latency_seconds_count {float(n_new - 2)}",
        "halfmoon_e2e_request_latency_seconds_count 2.0",
        "halfmoon_first_decode_seconds_count 2.0",
    ):
        assert line in lines


async def test_the_stages_of_first_tokens_add_up_to_the_times_to_them(
    client: httpx.AsyncClient, gateway: ScriptedGateway, registry: CollectorRegistry
) -> None:
    gateway.stages = {"queue": 0.0, "prefill": 0.01}
    gateway.n_before_pause = 0
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(post(client, COMPLETIONS, {**PROMPT, "max_tokens": 2}))
        while len(gateway.live) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)  # more than the stages say, as it is
        gateway.resume.set()
    sums = [
        registry.get_sample_value("halfmoon_ttft_stage_seconds_sum", {"stage": stage})
        for stage in TTFT_STAGES
    ]
    whole = registry.get_sample_value("halfmoon_time_to_first_token_seconds_sum")
    assert whole and sum(each or 0 for each in sums) == pytest.approx(whole)
    n = registry.get_sample_value("halfmoon_ttft_stage_seconds_count", {"stage": "deliver"})
    assert n == 2


async def test_another_app_is_served_at_its_path_and_below(
    gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        body = f"{scope['method']} {scope['path']} {scope['query_string'].decode()}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    app = create_app(
        gateway, tokenizer, registry=CollectorRegistry(), extra_mounts=[("/metadata", mounted)]
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        assert (await client.put("/metadata?key=a")).text == "PUT /metadata key=a"
        assert (await client.get("/metadata/deep")).text == "GET /metadata/deep "
        assert (await client.get("/metadata2")).status_code == 404


async def test_a_chat_without_a_limit_gets_what_fits_the_largest_workers(
    tokenizer: HubTokenizer,
) -> None:
    card = ModelCard(name="lab/moon", max_context=131_072, fits=4096, fair_share=2048, created=1)
    gateway = ScriptedGateway([5, 0], model=card)
    app = create_app(gateway, tokenizer, registry=CollectorRegistry())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == 4096
        await post(client, CHAT, HELLO)
        await post(client, CHAT, {**HELLO, "max_tokens": 3})
        long = {"role": "user", "content": "a b" * 1000}
        await post(client, CHAT, {**HELLO, "messages": [long]})
        longer = {"role": "user", "content": "a b" * 4500}
        refused = await client.post(CHAT, json={**HELLO, "messages": [longer]})
    open_end, limited, behind = gateway.requests
    assert (open_end.open_end, open_end.stopping.max_new_tokens) == (True, 2048)
    assert (limited.open_end, limited.stopping.max_new_tokens) == (False, 3)
    assert behind.stopping.max_new_tokens == 4096 - len(behind.prompt_token_ids) < 2048
    assert refused.status_code == 400
    assert "memory for 4096 tokens of prompt and answer" in refused.json()["error"]["message"]


async def test_a_fake_model_chats_without_files() -> None:
    gateway = ScriptedGateway([5, 6], model=ModelCard(name="tiny", max_context=64, created=1))
    app = create_app(gateway, FakeTokenizer(), registry=CollectorRegistry())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        answer = await post(client, CHAT, {**HELLO, "model": "tiny", "max_tokens": 3})
    assert answer["choices"][0]["message"]["content"] == " t5 t6 t5"


@settings(max_examples=by_day(25, at_night=100))
@given(data=st.data())
async def test_streamed_or_whole_any_tokens_give_the_same_text(
    app: FastAPI,
    gateway: ScriptedGateway,
    tokenizer: HubTokenizer,
    events_of: Events,
    data: st.DataObject,
) -> None:
    token_ids = st.integers(1, tokenizer.vocab_size - 1)
    gateway.script = data.draw(st.lists(token_ids, min_size=1, max_size=20))
    stop = data.draw(st.sampled_from([None, "e", " ", "the", "��"]))
    body = {**PROMPT, "max_tokens": len(gateway.script), "stop": stop}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        whole = await post(client, COMPLETIONS, body)
        streamed = await client.post(COMPLETIONS, json={**body, "stream": True})
    text = tokenizer.decode(gateway.script)
    expected = text if stop is None else text.split(stop)[0]
    assert whole["choices"][0]["text"] == expected
    chunks = events_of(streamed.text)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, HELLO)])
@pytest.mark.parametrize("wish", ["string", "token", "nothing"])
async def test_what_a_client_asked_to_stop_at_is_named_where_it_ended_the_text(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    events_of: Events,
    path: str,
    body: dict[str, Any],
    wish: str,
) -> None:
    token = gateway.script[4]
    wishes: dict[str, Any] = {"string": {"stop": ["half"]}, "token": {"stop_token_ids": [token]}}
    asked = {**body, "max_tokens": 100, **wishes.get(wish, {})}
    named = {"string": "half", "token": token}.get(wish)
    (choice,) = (await post(client, path, asked))["choices"]
    streamed = events_of((await client.post(path, json={**asked, "stream": True})).text)
    choices = [chunk["choices"][0] for chunk in streamed[:-1]]
    assert choice["finish_reason"] == choices[-1]["finish_reason"] == "stop"
    assert choice.get("stop_reason") == choices[-1].get("stop_reason") == named
    assert all("stop_reason" not in each for each in choices[:-1])
