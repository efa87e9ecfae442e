"""Several answers to one request: batches of prompts, `n`, and what fails in one of them."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from halfmoon_conductor.errors import ServerOverloaded
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT: dict[str, Any] = {"model": "lab/moon", "prompt": "Say it", "max_tokens": 4}
HELLO: dict[str, Any] = {"model": "lab/moon", "messages": [{"role": "user", "content": "Hello"}]}
Events = Callable[[str], list[Any]]


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("prompts", [["Say it", "Say"], [[70, 71, 72], [73]]])
async def test_a_batch_of_prompts_is_answered_in_order_and_each_counted_once(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer, prompts: Any
) -> None:
    gateway.n_cached = 1
    answer = await post(client, COMPLETIONS, {**PROMPT, "prompt": prompts, "n": 2})
    tokens = [
        tuple(tokenizer.encode(each, add_special_tokens=True)) if isinstance(each, str) else
        tuple(each)
        for each in prompts
    ]  # fmt: skip
    made = {each.request_id: each for each in gateway.requests}
    assert [made[f"{answer['id']}-{i}"].prompt_token_ids for i in range(4)] == [
        tokens[0], tokens[0], tokens[1], tokens[1],
    ]  # fmt: skip
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {
        "prompt_tokens": len(tokens[0]) + len(tokens[1]),
        "completion_tokens": 16,
        "total_tokens": len(tokens[0]) + len(tokens[1]) + 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_choices_draw_with_seeds_of_their_own(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    await post(client, CHAT, {**HELLO, "n": 3, "seed": 2**63 - 2})
    assert sorted(each.sampling.seed for each in gateway.requests) == [
        0, 2**63 - 2, 2**63 - 1,
    ]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, HELLO)])
async def test_a_stream_of_several_choices_says_each_whole_and_the_usage_once(
    client: httpx.AsyncClient, events_of: Events, path: str, body: dict[str, Any]
) -> None:
    whole = await post(client, path, {**body, "n": 3})
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": 3}
    response = await client.post(path, json={**body, **options})
    *chunks, usage, last = events_of(response.text)
    assert last == "[DONE]"
    assert usage["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        mine = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == index]
        said = "".join(
            each["text"] if path == COMPLETIONS else each["delta"].get("content", "")
            for each in mine
        )
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert said == text
        assert [each["finish_reason"] for each in mine if each["finish_reason"]] == [
            choice["finish_reason"]
        ]


async def test_continuous_usage_counts_up(client: httpx.AsyncClient, events_of: Events) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**PROMPT, "stream": True, "stream_options": options}
    *chunks, _ = events_of((await client.post(COMPLETIONS, json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_when_one_choice_is_refused_the_request_is_and_the_others_are_let_go(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.refusal = ServerOverloaded("too busy", 2.0)
    answer = await client.post(COMPLETIONS, json={**PROMPT, "n": 3})
    assert answer.status_code == 429
    assert not gateway.live


async def test_when_one_choice_fails_the_others_are_let_go(
    client: httpx.AsyncClient, gateway: ScriptedGateway, events_of: Events
) -> None:
    gateway.failure = RuntimeError("swordfish")
    body = {**PROMPT, "n": 3, "stream": True}
    *chunks, last = events_of((await client.post(COMPLETIONS, json=body)).text)
    assert chunks
    assert last["error"]["type"] == "server_error"
    assert "swordfish" not in last["error"]["message"]
    assert not gateway.live


@pytest.mark.parametrize("prompt", ["Say it", [70, 71]])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_begins_with_the_prompt(
    client: httpx.AsyncClient,
    tokenizer: HubTokenizer,
    events_of: Events,
    prompt: Any,
    stream: bool,
) -> None:
    body = {**PROMPT, "prompt": prompt}
    plain = (await post(client, COMPLETIONS, body))["choices"][0]["text"]
    echoed = await client.post(COMPLETIONS, json={**body, "echo": True, "stream": stream})
    text = (
        "".join(each["choices"][0]["text"] for each in events_of(echoed.text)[:-1])
        if stream
        else echoed.json()["choices"][0]["text"]
    )
    assert text == (prompt if isinstance(prompt, str) else tokenizer.decode(prompt)) + plain


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token", [70, 0])
async def test_an_echo_of_no_new_token_is_the_prompt_alone(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    events_of: Events,
    stream: bool,
    token: int,
) -> None:
    """Whatever the one token is that is generated for the prompt's scores, an end token even."""
    gateway.script = [token]
    body = {**PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    answer = await client.post(COMPLETIONS, json=body)
    choices = (
        [each["choices"][0] for each in events_of(answer.text)[:-1]]
        if stream
        else answer.json()["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == "Say it"
    n_prompt = len(gateway.requests[0].prompt_token_ids)
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == n_prompt
    assert choices[-1]["finish_reason"] == "length"
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 0
    counted = (await client.get("/metrics")).text.splitlines()
    assert "halfmoon_generation_tokens_total 0.0" in counted
