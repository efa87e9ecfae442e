"""Long answers: written elsewhere, in pieces, and the same as short ones are."""

import asyncio
import re
from typing import Any

import pytest

from halfmoon_conductor.api.json_writing import dump_json
from halfmoon_conductor.api.openai import openai_serializer
from halfmoon_conductor.api.openai.openai_objects import (
    CompletionChoice,
    CompletionUsage,
    PromptTokensDetails,
    TextCompletion,
)
from halfmoon_conductor.inputs import input_processor
from tests.conductor.fronts import CHAT, COMPLETIONS, Front

TELLING = [
    (COMPLETIONS, {"prompt": [70, 71, 72] * 40, "prompt_logprobs": 2, "n": 2}),
    (COMPLETIONS, {"prompt": [70, 71] * 40, "echo": True, "logprobs": 3}),
    (COMPLETIONS, {"prompt": [70, 71] * 40, "return_token_ids": True, "logprobs": 3}),
    (COMPLETIONS, {"prompt": [70] * 80, "echo": True, "logprobs": 3, "stream": True}),
    (COMPLETIONS, {"prompt": [70] * 80, "return_token_ids": True, "stream": True}),
    (CHAT, {"logprobs": True, "top_logprobs": 5, "prompt_logprobs": 1, "return_token_ids": True}),
]
_CHANCE = re.compile(r'("id":"|"created":)[^,]*')


@pytest.mark.parametrize(("path", "fields"), TELLING)
async def test_a_long_answer_is_written_as_a_short_one_is(
    front: Front, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for most in (10**9, 0):
        monkeypatch.setattr(openai_serializer, "MAX_INLINE_ANSWER_TOKENS", most)
        answer = await front.post(path, fields, max_tokens=60)
        assert answer.status_code == 200, answer.text
        told.append(_CHANCE.sub(r"\1", answer.text))
    assert told[0] == told[1]


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
            id="a", object="text_completion", created=1, model="m", system_fingerprint=None,
            choices=choices, usage=usage,
        )  # fmt: skip
        assert dump_json(whole) == whole.model_dump_json(exclude_unset=True).encode()


@pytest.mark.parametrize(
    ("limit", "fields", "param"),
    [
        ("MAX_PROMPT_TOKENS", {"prompt": [70] * 30}, "n"),
        ("MAX_RETURNED_TOKEN_IDS", {"prompt": [70] * 30, "return_token_ids": True},
         "return_token_ids"),
        ("MAX_ECHOED_CHARACTERS", {"prompt": "a" * 30, "echo": True}, "echo"),
    ],
)  # fmt: skip
async def test_what_an_answer_repeats_is_bounded(
    front: Front, monkeypatch: pytest.MonkeyPatch, limit: str, fields: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr(input_processor, limit, 119)
    error = await front.refused(COMPLETIONS, fields, n=4)
    assert error["param"] == param and "119" in error["message"]
    await front.ask(COMPLETIONS, fields, n=3)


async def test_choices_begin_one_after_the_other_with_room_for_others_between_them(
    front: Front,
) -> None:
    seen: set[int] = set()

    async def watch() -> None:
        while True:
            seen.add(len(front.gateway.live))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    front.gateway.n_before_pause = 0
    asking = asyncio.create_task(front.ask(COMPLETIONS, n=100, max_tokens=2))
    async with asyncio.timeout(20):
        while len(front.gateway.live) < 100:
            await asyncio.sleep(0)
    front.gateway.resume.set()
    await asking
    watching.cancel()
    assert len(seen) > 50, "not all in one turn of the loop"
