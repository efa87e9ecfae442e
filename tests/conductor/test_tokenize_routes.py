"""/tokenize and /detokenize."""

import json
from typing import Any

import pytest

from tests.conductor.fronts import CHAT, COMPLETIONS, DETOKENIZE, HELLO, TOKENIZE, Front, error_of


async def test_a_text_becomes_its_tokens_and_they_the_text_again(front: Front) -> None:
    text = "The moon 🌗 is half."
    answer = await front.ask(TOKENIZE, prompt=text, return_token_strs=True)
    assert answer["tokens"] == front.tokenizer.encode(text, add_special_tokens=True)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 200
    back = await front.ask(DETOKENIZE, model="lab/moon", tokens=answer["tokens"])
    assert back == {"prompt": text}
    assert await front.ask(DETOKENIZE, tokens=[]) == {"prompt": ""}
    assert (await front.ask(TOKENIZE, prompt=""))["tokens"] == []


CALL = {"id": "c1", "type": "function", "function": {"name": "rise", "arguments": '{"h": 3}'}}
CALLED: dict[str, Any] = {
    "messages": [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "soon"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "rise"}}],
}


async def test_a_conversation_becomes_the_tokens_that_a_chat_is_computed_from(
    front: Front,
) -> None:
    for fields in (
        {"messages": HELLO},
        CALLED,
        {**CALLED, "tools": None},
        {**CALLED, "chat_template_kwargs": {"enable_thinking": False}},
    ):
        answer = await front.ask(TOKENIZE, fields)
        await front.ask(CHAT, fields)
        assert tuple(answer["tokens"]) == front.last.prompt_token_ids
        assert answer["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (TOKENIZE, {}, 400, "prompt"),
        (TOKENIZE, {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        (TOKENIZE, {"prompt": "a", "model": "other"}, 404, "model"),
        (TOKENIZE, {"prompt": "a", "tools": [{}]}, 400, "tools[0].type"),
        (DETOKENIZE, {"tokens": [1, 100_000]}, 400, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, 400, "tokens[0]"),
        (DETOKENIZE, {"tokens": "a"}, 400, "tokens"),
    ],
)
async def test_what_cannot_be_done_is_refused(
    front: Front, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    assert (await front.error(path, status, body))["param"] == param


async def test_latencies_come_in_headers_as_well_as_in_the_body(front: Front) -> None:
    async def post(headers: dict[str, str], **more: Any) -> Any:
        body = {"model": "lab/moon", "prompt": "a", "max_tokens": 1, **more}
        return await front.send(COMPLETIONS, json.dumps(body), **headers)

    headers = {"X-TTFT-SLO-S": "1.5", "X-TBT-SLO-S": "0.25"}
    for more in ({}, {"ttft_slo_s": 1.5}):
        assert (await post(headers, **more)).status_code == 200
        made = front.gateway.requests.pop()
        assert (made.ttft_slo_s, made.tbt_slo_s) == (1.5, 0.25)
    refusal = error_of(await post(headers, tbt_slo_s=1.0), 400)
    assert "tbt_slo_s is 1.0" in refusal["message"]
    for bad in ("soon", "0", "-1", "inf", "nan"):
        error = error_of(await post({"X-TTFT-SLO-S": bad}), 400)
        assert error["param"] == "x-ttft-slo-s", bad
    assert not front.gateway.requests
