"""Long answers: written elsewhere, in pieces, and the same as short ones are."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from halfmoon_conductor.api.json_writing import dump_json
from halfmoon_conductor.api.openai import openai_serializer
from halfmoon_conductor.api.openai.openai_objects import (
    CompletionChoice,
    CompletionUsage,
    PromptTokensDetails,
    TextCompletion,
)
from halfmoon_conductor.inputs import input_processor
from halfmoon_testing.conductor_http import ScriptedGateway

TELLING = [
    ("/v1/completions", {"prompt": [70, 71, 72] * 40, "prompt_logprobs": 2, "n": 2}),
    ("/v1/completions", {"prompt": [70, 71] * 40, "echo": True, "logprobs": 3}),
    ("/v1/completions", {"prompt": [70, 71] * 40, "return_token_ids": True, "logprobs": 3}),
    ("/v1/completions", {"prompt": [70] * 80, "echo": True, "logprobs": 3, "stream": True}),
    ("/v1/completions", {"prompt": [70] * 80, "return_token_ids": True, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True,
                              "top_logprobs": 5, "prompt_logprobs": 1, "return_token_ids": True}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), TELLING)
async def test_a_long_answer_is_written_as_a_short_one_is(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "lab/moon", "max_tokens": 60, **fields}
    told = []
    for most in (10**9, 0):
        monkeypatch.setattr(openai_serializer, "MAX_INLINE_ANSWER_TOKENS", most)
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        told.append(_without_ids(answer.text))
    assert told[0] == told[1]


def _without_ids(text: str) -> str:
    for mark in ('"id":"', '"created":'):
        first, *rest = text.split(mark)
        text = mark.join([first, *(each[each.index(",") :] for each in rest)])
    return text


def test_fields_that_are_not_set_are_left_out_at_any_depth() -> None:
    details = PromptTokensDetails(cached_tokens=0)
    usage = CompletionUsage(
        prompt_tokens=1, completion_tokens=0, total_tokens=1, prompt_tokens_details=details
    )
    choice = CompletionChoice(index=0, text="é\n", logprobs=None, finish_reason="stop")
    choice.token_ids = list(range(1000))
    many = [choice.model_copy(update={"index": i}) for i in range(3)]
    for choices in ([], [choice], many):
        whole = TextCompletion(
            id="a",
            object="text_completion",
            created=1,
            model="m",
            system_fingerprint=None,
            choices=choices,
            usage=usage,
        )
        assert dump_json(whole) == whole.model_dump_json(exclude_unset=True).encode()


@pytest.mark.parametrize(
    ("limit", "fields", "param"),
    [
        ("MAX_PROMPT_TOKENS", {"prompt": [70] * 30, "n": 4}, "n"),
        ("MAX_RETURNED_TOKEN_IDS", {"prompt": [70] * 30, "n": 4, "return_token_ids": True},
         "return_token_ids"),
        ("MAX_ECHOED_CHARACTERS", {"prompt": "a" * 30, "n": 4, "echo": True}, "echo"),
    ],
)  # fmt: skip
async def test_what_an_answer_repeats_is_bounded(
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    fields: dict[str, Any],
    param: str,
) -> None:
    body = {"model": "lab/moon", "max_tokens": 2, **fields}
    monkeypatch.setattr(input_processor, limit, 119)
    error = (await client.post("/v1/completions", json=body)).json()["error"]
    assert error["param"] == param
    assert "119" in error["message"]
    assert (await client.post("/v1/completions", json={**body, "n": 3})).status_code == 200


async def test_choices_begin_one_after_the_other_with_room_for_others_between_them(
    app: FastAPI, client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    seen: set[int] = set()

    async def watch() -> None:
        while True:
            seen.add(len(gateway.live))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    gateway.n_before_pause = 0
    body = {"model": "lab/moon", "prompt": "a", "n": 100, "max_tokens": 2}
    asking = asyncio.create_task(client.post("/v1/completions", json=body))
    async with asyncio.timeout(20):
        while len(gateway.live) < 100:
            await asyncio.sleep(0)
    gateway.resume.set()
    assert (await asking).status_code == 200
    watching.cancel()
    assert len(seen) > 50, "not all in one turn of the loop"
