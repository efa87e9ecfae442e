"""/tokenize and /detokenize."""

from typing import Any

import httpx
import pytest

from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway


async def test_a_text_becomes_its_tokens_and_they_the_text_again(
    client: httpx.AsyncClient, tokenizer: HubTokenizer
) -> None:
    text = "The moon 🌗 is half."
    body = {"prompt": text, "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["tokens"] == tokenizer.encode(text, add_special_tokens=True)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 200
    back = await client.post("/detokenize", json={"model": "lab/moon", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


async def test_a_conversation_becomes_the_tokens_that_a_chat_is_computed_from(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    messages = {"messages": [{"role": "user", "content": "Hello"}]}
    answer = (await client.post("/tokenize", json=messages)).json()
    await client.post("/v1/chat/completions", json={"model": "lab/moon", **messages})
    assert tuple(answer["tokens"]) == gateway.requests[0].prompt_token_ids
    assert answer["token_strs"] is None


async def test_calls_null_contents_and_tools_are_tokenized_as_a_chat_is(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "rise", "arguments": '{"h": 3}'}}
    body = {
        "messages": [
            {"role": "user", "content": "When?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "soon"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "rise"}}],
    }
    for changed in ({}, {"tools": None}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = await client.post("/tokenize", json={**body, **changed})
        assert answer.status_code == 200, answer.text
        chat = {"model": "lab/moon", **body, **changed}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert tuple(answer.json()["tokens"]) == gateway.requests.pop().prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        (
            "/tokenize",
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            400,
            "prompt",
        ),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, 400, "tools[0].type"),
        ("/detokenize", {"tokens": [1, 100_000]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ],
)
async def test_what_cannot_be_done_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


async def test_no_tokens_are_no_text(client: httpx.AsyncClient) -> None:
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    assert (await client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []


async def test_latencies_come_in_headers_as_well_as_in_the_body(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    body: dict[str, Any] = {"model": "lab/moon", "prompt": "a", "max_tokens": 1}
    headers = {"X-TTFT-SLO-S": "1.5", "X-TBT-SLO-S": "0.25"}

    async def post(more: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        return await client.post("/v1/completions", json={**body, **more}, headers=headers)

    for more in ({}, {"ttft_slo_s": 1.5}):
        assert (await post(more, headers)).status_code == 200
        made = gateway.requests.pop()
        assert (made.ttft_slo_s, made.tbt_slo_s) == (1.5, 0.25)
    refusal = await post({"tbt_slo_s": 1.0}, headers)
    assert refusal.status_code == 400
    assert "tbt_slo_s is 1.0" in refusal.json()["error"]["message"]
    for bad in ("soon", "0", "-1", "inf", "nan"):
        error = (await post({}, {"X-TTFT-SLO-S": bad})).json()["error"]
        assert error["param"] == "x-ttft-slo-s", bad
    assert not gateway.requests
