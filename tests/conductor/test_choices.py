"""Several answers to one request: batches of prompts, `n`, and what fails in one of them."""

import asyncio
import re
from typing import Any

import pytest

from halfmoon_conductor.api.openai import openai_serializer
from halfmoon_conductor.errors import ServerOverloaded
from halfmoon_conductor.inputs import input_processor
from tests.conductor.fronts import CHAT, COMPLETIONS, Front

SHORT = {"max_tokens": 4}


@pytest.mark.parametrize("prompts", [["Say it", "Say"], [[70, 71, 72], [73]]])
async def test_a_batch_of_prompts_is_answered_in_order_and_each_counted_once(
    front: Front, prompts: Any
) -> None:
    front.gateway.n_cached = 1
    answer = await front.ask(COMPLETIONS, SHORT, prompt=prompts, n=2)
    encode = front.tokenizer.encode
    first, second = (
        tuple(encode(each, add_special_tokens=True) if isinstance(each, str) else each)
        for each in prompts
    )
    made = {each.request_id: each.prompt_token_ids for each in front.gateway.requests}
    assert [made[f"{answer['id']}-{i}"] for i in range(4)] == [first, first, second, second]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {
        "prompt_tokens": len(first) + len(second),
        "completion_tokens": 16,
        "total_tokens": len(first) + len(second) + 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_choices_draw_with_seeds_of_their_own(front: Front) -> None:
    await front.ask(CHAT, n=3, seed=2**63 - 2)
    seeds = sorted(each.sampling.seed for each in front.gateway.requests)
    assert seeds == [0, 2**63 - 2, 2**63 - 1]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_says_each_choice_whole_and_the_usage_once_if_it_is_asked_for(
    front: Front, path: str, n: int
) -> None:
    front.gateway.n_cached = 3
    whole = await front.ask(path, SHORT, n=n)
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    asked = {**SHORT, "n": n, "stream_options": {"include_usage": True}}
    *chunks, usage, last = await front.stream(path, asked)
    assert last == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        parts = [each["choices"][0] for each in chunks]
        mine = [each for each in parts if each["index"] == choice["index"]]
        if path == COMPLETIONS:
            said, text = [each["text"] for each in mine], choice["text"]
        else:
            said = [each["delta"].get("content", "") for each in mine]
            text = choice["message"]["content"]
        assert "".join(said) == text
        ends = [each["finish_reason"] for each in mine if each["finish_reason"]]
        assert ends == [choice["finish_reason"]] == ["length"]


async def test_continuous_usage_counts_up(front: Front) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = await front.stream(COMPLETIONS, SHORT, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 4


async def test_when_one_choice_is_refused_or_fails_the_others_are_let_go(front: Front) -> None:
    front.gateway.refusal = ServerOverloaded("too busy", 2.0)
    await front.error(COMPLETIONS, 429, n=3)
    assert not front.gateway.live
    front.gateway.refusal, front.gateway.failure = None, RuntimeError("swordfish")
    *chunks, last = await front.stream(COMPLETIONS, SHORT, n=3)
    assert chunks
    assert last["error"]["type"] == "server_error"
    assert "swordfish" not in last["error"]["message"]
    assert not front.gateway.live


@pytest.mark.parametrize("prompt", ["Say it", [70, 71]])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_begins_with_the_prompt(front: Front, prompt: Any, stream: bool) -> None:
    plain = (await front.choice(COMPLETIONS, SHORT, prompt=prompt))["text"]
    echoed = await front.choices(COMPLETIONS, SHORT, prompt=prompt, echo=True, stream=stream)
    shown = prompt if isinstance(prompt, str) else front.tokenizer.decode(prompt)
    assert "".join(choice["text"] for choice in echoed) == shown + plain


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token", [70, 0], ids=["whatever token comes", "an end token even"])
async def test_an_echo_of_no_new_token_is_the_prompt_alone(
    front: Front, stream: bool, token: int
) -> None:
    front.gateway.script = [token]
    asked = {"echo": True, "max_tokens": 0, "logprobs": 1}
    choices = await front.choices(COMPLETIONS, asked, stream=stream)
    assert "".join(choice["text"] for choice in choices) == "Say it"
    n_told = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
    assert n_told == len(front.last.prompt_token_ids)
    assert choices[-1]["finish_reason"] == "length"
    assert "halfmoon_generation_tokens_total 0.0" in await front.metrics()
    assert (await front.ask(COMPLETIONS, asked))["usage"]["completion_tokens"] == 0


# -- long answers: written elsewhere, in pieces, and the same as short ones are -------------------

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
