"""What a client reads when all is well."""

from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.page.page_routes import page_routes
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import CHAT, COMPLETIONS, TEXT, Front, error_of, events_of, open_front
from tests.nightly import by_day

LONG = {"max_tokens": 100}


async def test_a_completion_is_answered_whole(front: Front) -> None:
    front.gateway.n_cached = 1
    answer = await front.ask(COMPLETIONS, LONG)
    n_prompt = len(front.tokenizer.encode("Say it", add_special_tokens=True))
    n_new = len(front.gateway.script)
    assert answer.pop("id") == front.last.request_id
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


async def test_a_chat_is_answered_whole(front: Front) -> None:
    answer = await front.ask(CHAT)
    assert answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": TEXT, "refusal": None}
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    ]
    assert front.prompt() == "user:Hiassistant:"
    assert front.last.prompt_token_ids[0] == 1  # <|turn|>
    assert front.last.request_id.startswith("chatcmpl-")


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_an_empty_delta(
    front: Front,
) -> None:
    response = await front.post(CHAT, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, last = events_of(response.text)
    assert last == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    first, *deltas, end = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert (first, end) == ({"role": "assistant", "content": ""}, {})
    assert "".join(delta["content"] for delta in deltas) == TEXT
    assert all(delta["content"] for delta in deltas)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_each_event_says_what_computed_it_also_once_that_has_changed(
    front: Front, card: ModelCard, path: str
) -> None:
    for fingerprint in ("fp_0123456789ab", "fp_ba9876543210"):
        front.gateway.card = msgspec.structs.replace(card, fingerprint=fingerprint)
        *chunks, _ = await front.stream(path)
        assert {chunk["system_fingerprint"] for chunk in chunks} == {fingerprint}


async def test_a_stop_string_cuts_the_answer_and_ends_the_generation(front: Front) -> None:
    answer = await front.ask(COMPLETIONS, LONG, stop=["半月", " nowhere"])
    assert answer["choices"][0]["text"] == "The moon 🌗 is half "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert front.gateway.n_said < len(front.gateway.script)
    assert answer["usage"]["completion_tokens"] == front.gateway.n_said
    assert front.gateway.cancelled == [front.last.request_id]
    # What may begin one is said when it was none.
    choices = await front.choices(COMPLETIONS, LONG, stop="full.!", stream=True)
    assert "".join(choice["text"] for choice in choices) == TEXT


async def test_every_parameter_reaches_the_gateway(front: Front) -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 11,
    }
    stopping = {"max_tokens": 9, "stop_token_ids": [8, 0], "min_tokens": 2}
    more = {"cache_salt": "tenant", "ttft_slo_s": 1.5, "tbt_slo_s": 0.1, "user": "me"}
    more["priority"] = 7  # HTTP's go first when they are small, as in vLLM; the core's when large
    await front.ask(COMPLETIONS, sampling | stopping | more, prompt=[5, 6, 7])
    made = front.last
    assert made.prompt_token_ids == (5, 6, 7)
    assert {name: getattr(made.sampling, name) for name in sampling} == sampling
    assert (made.stopping.max_new_tokens, made.stopping.min_new_tokens) == (9, 2)
    assert made.stopping.stop_token_ids == (0, 8)
    assert (made.salt, made.ttft_slo_s, made.tbt_slo_s) == ("\x1ftenant", 1.5, 0.1)
    assert made.priority == -7


async def test_what_is_left_out_or_null_has_openais_defaults(front: Front) -> None:
    nothing: dict[str, Any] = {
        "n": 1,
        "echo": False,
        "logprobs": None,
        "logit_bias": {},
        "stop": None,
    }
    await front.ask(COMPLETIONS, nothing)
    await front.ask(COMPLETIONS)
    first, second = front.gateway.requests
    assert first.stopping.max_new_tokens == 16
    assert first.stopping.stop_token_ids == (0,)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (1, 1, 0)
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id != second.request_id
    assert first.salt == ""


async def test_seeds_and_extremes_fit_what_workers_take(front: Front) -> None:
    await front.ask(COMPLETIONS, seed=-1, top_k=-1, temperature=1e-9)
    sampling = front.last.sampling
    assert (sampling.seed, sampling.top_k, sampling.temperature) == (2**63 - 1, 0, 0)


async def test_an_answer_goes_on_after_an_end_token_when_it_is_ignored(front: Front) -> None:
    n_new = 2 * len(front.gateway.script)
    choice = await front.choice(COMPLETIONS, max_tokens=n_new, ignore_eos=True)
    assert (choice["text"], choice["finish_reason"]) == (TEXT + TEXT, "length")


async def test_a_chat_gets_the_rest_of_the_context_and_a_completion_no_more_than_that(
    front: Front, card: ModelCard
) -> None:
    front.gateway.script = [70]
    assert (await front.ask(CHAT))["usage"]["total_tokens"] == card.max_context
    answer = await front.ask(COMPLETIONS, prompt=[70] * (card.max_context - 3))
    assert answer["usage"]["completion_tokens"] == 3


async def test_parts_of_a_content_are_joined_and_an_old_turn_is_taken_back(front: Front) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "more", "name": "me"},
    ]
    await front.ask(CHAT, messages=messages, add_generation_prompt=False)
    assert front.prompt() == "system:briefuser:one\ntwoassistant:yesuser:more"


async def test_a_request_keeps_its_id_or_gets_one(front: Front) -> None:
    answer = await front.get("/health", headers={"x-request-id": "trace-7"})
    assert answer.headers["x-request-id"] == "trace-7"
    for unusable in ("", "a b", "x" * 200):
        answer = await front.get("/health", headers={"x-request-id": unusable})
        assert answer.headers["x-request-id"].startswith("req-")


async def test_models_are_listed_once_a_worker_has_joined(front: Front) -> None:
    described = {
        "id": "lab/moon",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "halfmoon",
        "max_model_len": 200,
        "default_sampling_params": {},
    }
    assert (await front.get("/v1/models")).json() == {"object": "list", "data": [described]}
    assert (await front.get("/v1/models/lab/moon")).json() == described
    front.gateway.card = None
    assert (await front.get("/v1/models")).json()["data"] == []


async def test_readiness_says_who_is_missing(front: Front) -> None:
    answer = await front.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "missing": []})
    front.gateway.roles_missing = ["decode"]
    answer = await front.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "missing": ["decode"]})
    assert (await front.get("/health")).status_code == 200


async def test_metrics_count_requests_and_tokens(front: Front) -> None:
    front.gateway.n_cached = 2
    for max_tokens in (5, 100):
        await front.ask(COMPLETIONS, prompt=[70, 71, 72], max_tokens=max_tokens)
    for path in ("/nowhere/1", "/nowhere/2"):
        error_of(await front.get(path), 404)
    answer = await front.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    n_new = 5 + len(front.gateway.script)
    for line in (
        'http_requests_total{route="/v1/completions",status="200"} 2.0',
        'http_requests_total{route="unmatched",status="404"} 2.0',
        "prompt_tokens_total 6.0",
        "prompt_tokens_cached_total 4.0",
        f"generation_tokens_total {float(n_new)}",
        'request_success_total{finished_reason="length"} 1.0',
        'request_success_total{finished_reason="stop"} 1.0',
        "time_to_first_token_seconds_count 2.0",
        f"inter_token_latency_seconds_count {float(n_new - 2)}",
        "e2e_request_latency_seconds_count 2.0",
        "first_decode_seconds_count 2.0",
    ):
        assert f"halfmoon_{line}" in answer.text.splitlines()


async def test_a_chat_without_a_limit_gets_what_fits_the_largest_workers(front: Front) -> None:
    front.gateway.card = ModelCard(
        name="lab/moon", max_context=131_072, fits=4096, fair_share=2048, created=1
    )
    front.gateway.script = [5, 0]
    (model,) = (await front.get("/v1/models")).json()["data"]
    assert model["max_model_len"] == 4096
    await front.ask(CHAT)
    await front.ask(CHAT, max_tokens=3)
    await front.ask(CHAT, messages=[{"role": "user", "content": "a b" * 1000}])
    refused = await front.refused(CHAT, messages=[{"role": "user", "content": "a b" * 4500}])
    open_end, limited, behind = front.gateway.requests
    assert (open_end.open_end, open_end.stopping.max_new_tokens) == (True, 2048)
    assert (limited.open_end, limited.stopping.max_new_tokens) == (False, 3)
    assert behind.stopping.max_new_tokens == 4096 - len(behind.prompt_token_ids) < 2048
    assert "memory for 4096 tokens of prompt and answer" in refused["message"]


async def test_a_fake_model_chats_without_files() -> None:
    gateway = ScriptedGateway([5, 6], model=ModelCard(name="tiny", max_context=64, created=1))
    async with open_front(gateway, FakeTokenizer()) as front:
        choice = await front.choice(CHAT, model="tiny", max_tokens=3)
    assert choice["message"]["content"] == " t5 t6 t5"


@settings(max_examples=by_day(25, at_night=100))
@given(data=st.data())
async def test_streamed_or_whole_any_tokens_give_the_same_text(
    front: Front, tokenizer: HubTokenizer, data: st.DataObject
) -> None:
    token_ids = st.integers(1, tokenizer.vocab_size - 1)
    script = data.draw(st.lists(token_ids, min_size=1, max_size=20))
    stop = data.draw(st.sampled_from([None, "e", " ", "the", "��"]))
    front.gateway.script = script
    text = tokenizer.decode(script)
    for stream in (False, True):
        asked = {"max_tokens": len(script), "stop": stop}
        choices = await front.choices(COMPLETIONS, asked, stream=stream)
        said = "".join(choice["text"] for choice in choices)
        assert said == (text if stop is None else text.split(stop)[0])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("wish", ["string", "token", "nothing"])
async def test_what_a_client_asked_to_stop_at_is_named_where_it_ended_the_text(
    front: Front, path: str, wish: str
) -> None:
    token = front.gateway.script[4]
    wishes: dict[str, Any] = {"string": {"stop": ["half"]}, "token": {"stop_token_ids": [token]}}
    asked = LONG | wishes.get(wish, {})
    choice = await front.choice(path, asked)
    *choices, last = await front.choices(path, asked, stream=True)
    assert choice["finish_reason"] == last["finish_reason"] == "stop"
    named = {"string": "half", "token": token}.get(wish)
    assert choice.get("stop_reason") == last.get("stop_reason") == named
    assert all("stop_reason" not in each for each in choices)


# -- for those who watch it ----------------------------------------------------------------------


async def test_a_conductor_that_lives_says_so_wherever_it_is_asked(front: Front) -> None:
    for path in ("/health", "/ping"):
        answer = await front.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        # A path has one method, so that `Allow` can tell all of them.
        assert (await front.client.options(path)).headers["allow"] == "GET, HEAD"


async def test_the_version_is_the_one_of_the_schema(front: Front, app: FastAPI) -> None:
    assert (await front.get("/version")).json() == {"version": app.version}
    assert (await front.get("/openapi.json")).json()["info"]["version"] == app.version


def paths(app: FastAPI) -> list[str]:
    """All paths that answer GET."""
    documented = [path for path, methods in app.openapi()["paths"].items() if "get" in methods]
    for name, value in {"{model}": "lab/moon", "{response_id}": "resp_1"}.items():
        documented = [path.replace(name, value) for path in documented]
    return [*documented, "/openapi.json", *(route.path for route in page_routes())]


async def test_every_route_of_get_answers_head(front: Front, app: FastAPI) -> None:
    asked = paths(app)
    assert {"/health", "/ready", "/v1/models", "/v1/models/lab/moon", "/metrics", "/"} <= {*asked}
    for path in asked:
        got, head = await front.get(path), await front.client.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        # Two answers of the metrics differ, as each tells of the requests before it.
        differing = {"x-request-id"} | ({"content-length"} if path == "/metrics" else set())
        for name, value in got.headers.items():
            assert name in differing or head.headers[name] == value, path
        assert int(got.headers["content-length"]) == len(got.content) > 0
