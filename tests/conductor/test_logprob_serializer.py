"""Log probabilities as clients read them."""

import json
import random
from collections.abc import Callable
from math import inf
from typing import Any

import httpx
import pytest

from halfmoon_conductor.api.openai.logprob_serializer import LogprobSerializer
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_testing.conductor_http import ScriptedGateway, scripted_score

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT: dict[str, Any] = {"model": "lab/moon", "prompt": [72, 80], "max_tokens": 100}
HELLO: dict[str, Any] = {"model": "lab/moon", "messages": [{"role": "user", "content": "Hello"}]}
Events = Callable[[str], list[Any]]


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_completion_names_each_token_with_the_likeliest_beside_it(
    client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    answer = await post(client, COMPLETIONS, {**PROMPT, "logprobs": 2})
    told = answer["choices"][0]["logprobs"]
    texts = [tokenizer.token_bytes(token).decode(errors="replace") for token in gateway.script]
    assert told["tokens"] == texts
    assert texts[-1] == "<|end|>"
    assert told["token_logprobs"] == [scripted_score(token, 2).logprob for token in gateway.script]
    written = [tokenizer.token_bytes(token) for token in gateway.script]
    assert told["text_offset"] == [
        len(b"".join(written[:i]).decode(errors="ignore")) for i in range(len(texts))
    ]
    for text, top, token in zip(texts, told["top_logprobs"], gateway.script, strict=True):
        assert top.pop(text, scripted_score(token, 2).logprob) in (
            scripted_score(token, 2).logprob,
            -0.5,
            -1.0,
        )
        assert set(top.values()) <= {-0.5, -1.0}


async def test_an_echo_has_those_of_the_prompt_too_and_null_for_its_first_token(
    client: httpx.AsyncClient, gateway: ScriptedGateway, events_of: Events
) -> None:
    body = {**PROMPT, "logprobs": 1, "echo": True, "max_tokens": 2}
    whole = (await post(client, COMPLETIONS, body))["choices"][0]["logprobs"]
    assert whole["token_logprobs"] == [
        None, *(scripted_score(token, 1).logprob for token in (80, *gateway.script[:2])),
    ]  # fmt: skip
    assert whole["top_logprobs"][0] is None
    assert gateway.requests[0].sampling.prompt_logprobs == 1
    chunks = events_of((await client.post(COMPLETIONS, json={**body, "stream": True})).text)[:-1]
    for name in whole:
        streamed = [each for c in chunks for each in c["choices"][0]["logprobs"][name]]
        assert streamed == whole[name]


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_count_characters_whatever_tokens_they_have(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    tokenizer: HubTokenizer,
    events_of: Events,
    stream: bool,
) -> None:
    """A moon has several tokens, and they have its offset; a stop token comes behind the text."""
    said = tokenizer.encode("é 🌗 half 半", add_special_tokens=False)
    prompt = "🌘<|end|>moon é"
    gateway.script = [*said, 0]
    body = {**PROMPT, "prompt": prompt, "logprobs": 0, "echo": True, "max_tokens": 50}
    answer = await client.post(COMPLETIONS, json={**body, "stream": stream})
    choices = (
        [each["choices"][0] for each in events_of(answer.text)[:-1]]
        if stream
        else answer.json()["choices"]
    )
    text = "".join(choice["text"] for choice in choices)
    assert text == f"{prompt}é 🌗 half 半"
    offsets = [each for choice in choices for each in choice["logprobs"]["text_offset"]]
    tokens = [*gateway.requests[0].prompt_token_ids, *said]
    wanted, seen = [], b""
    for token in tokens:
        wanted.append(len(seen.decode(errors="ignore")))
        seen += tokenizer.token_bytes(token)
    assert offsets == [*wanted, len(text)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 50])
async def test_an_echo_of_tokens_cut_inside_a_character_goes_on_within_it(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    tokenizer: HubTokenizer,
    events_of: Events,
    stream: bool,
    max_tokens: int,
) -> None:
    whole = tokenizer.encode("a moon 🌗 is half 半", add_special_tokens=False)
    ends = [tokenizer.decode(whole[:n]).endswith("\ufffd") for n in range(len(whole))]
    assert any(ends)
    for cut in (n for n, is_inside in enumerate(ends) if is_inside):
        gateway.script = [*whole[cut:], 0]
        body = {
            **PROMPT, "prompt": whole[:cut], "echo": True, "logprobs": 0, "max_tokens": max_tokens,
        }  # fmt: skip
        answer = await client.post(COMPLETIONS, json={**body, "stream": stream})
        choices = (
            [each["choices"][0] for each in events_of(answer.text)[:-1]]
            if stream
            else answer.json()["choices"]
        )
        text = "".join(choice["text"] for choice in choices)
        assert text == tokenizer.decode(whole if max_tokens else whole[:cut])
        offsets = [each for choice in choices for each in choice["logprobs"]["text_offset"]]
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(text)


async def test_a_chat_names_tokens_with_their_bytes_streamed_or_whole(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    tokenizer: HubTokenizer,
    events_of: Events,
) -> None:
    body = {**HELLO, "logprobs": True, "top_logprobs": 2}
    whole = (await post(client, CHAT, body))["choices"][0]["logprobs"]
    assert [bytes(each["bytes"]) for each in whole["content"]] == [
        tokenizer.token_bytes(token) for token in gateway.script
    ]
    assert all(len(each["top_logprobs"]) == 2 for each in whole["content"])
    chunks = events_of((await client.post(CHAT, json={**body, "stream": True})).text)[:-1]
    told = [c["choices"][0]["logprobs"] for c in chunks]
    assert [each for one in told if one for each in one["content"]] == whole["content"]


async def test_without_being_asked_nothing_is_told(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    assert (await post(client, COMPLETIONS, PROMPT))["choices"][0]["logprobs"] is None
    assert (await post(client, CHAT, {**HELLO, "logprobs": False}))["choices"][0][
        "logprobs"
    ] is None
    assert all(each.sampling.logprobs is None for each in gateway.requests)


async def test_prompt_logprobs_are_told_by_token_id(client: httpx.AsyncClient) -> None:
    answer = await post(client, COMPLETIONS, {**PROMPT, "prompt_logprobs": 1})
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert set(second) == {"80", "70"}
    assert second["80"]["logprob"] == scripted_score(80, 1).logprob
    assert second["70"]["rank"] == 1
    assert len((await post(client, CHAT, {**HELLO, "prompt_logprobs": 0}))["prompt_logprobs"]) > 1


async def test_token_ids_are_given_beside_the_text(
    client: httpx.AsyncClient, gateway: ScriptedGateway, events_of: Events
) -> None:
    body = {**PROMPT, "return_token_ids": True}
    choice = (await post(client, COMPLETIONS, body))["choices"][0]
    assert choice["prompt_token_ids"] == PROMPT["prompt"]
    assert choice["token_ids"] == list(gateway.script)
    chunks = events_of((await client.post(COMPLETIONS, json={**body, "stream": True})).text)[:-1]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == PROMPT["prompt"]
    streamed = [each for c in chunks for each in c["choices"][0]["token_ids"]]
    assert streamed == list(gateway.script)
    body = {**HELLO, "return_token_ids": True}
    whole = await post(client, CHAT, body)
    assert whole["choices"][0]["token_ids"] == list(gateway.script)
    chunks = events_of((await client.post(CHAT, json={**body, "stream": True})).text)[:-1]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_an_impossible_token_is_told_as_a_number_that_json_has() -> None:
    writer = LogprobSerializer(FakeTokenizer(), as_token_ids=True)
    told = writer.completion([(7, TokenScore(float("-inf"), 900, ((5, 0.0),)))], [0])
    assert told.token_logprobs == [-9999.0]
    assert told.top_logprobs == [{"token_id:5": 0.0, "token_id:7": -9999.0}]


def test_of_tokens_that_look_alike_the_likeliest_is_told(tokenizer: HubTokenizer) -> None:
    halves = [token for token in range(300) if tokenizer.token_bytes(token) in (b"\x80", b"\x81")]
    first, second = halves[:2]
    told = LogprobSerializer(tokenizer).completion(
        [(second, TokenScore(-3.0, 2, ((first, -0.1), (second, -3.0))))], [0]
    )
    assert told.top_logprobs == [{"�": -0.1}]


@pytest.mark.parametrize(("body", "told"), [
    ({"prompt": [70] * 20, "max_tokens": 1, "prompt_logprobs": 20}, None),
    ({"prompt": [70] * 199, "max_tokens": 1, "prompt_logprobs": 20}, "500"),
    ({"prompt": [70] * 20, "max_tokens": 1, "prompt_logprobs": 20, "n": 2}, "500"),
])  # fmt: skip
async def test_too_many_scores_for_one_message_are_refused(
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    body: dict[str, Any],
    told: str | None,
) -> None:
    monkeypatch.setattr("halfmoon_conductor.inputs.input_processor.MAX_PROMPT_SCORES", 500)
    answer = await client.post(COMPLETIONS, json={**PROMPT, **body})
    if told is None:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert "over the 500 " in answer.json()["error"]["message"]


@pytest.mark.parametrize("as_token_ids", [False, True])
def test_an_event_is_written_as_the_whole_answer_is(
    tokenizer: HubTokenizer, as_token_ids: bool
) -> None:
    serializer = LogprobSerializer(tokenizer, as_token_ids=as_token_ids)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for n_top in (0, 1, 20):
        for _ in range(50):
            tokens = [dice.randrange(tokenizer.vocab_size) for _ in range(n_top + 1)]
            logprobs = [dice.choice((-dice.random() * 1e3, -1e-9, 0.0, -inf)) for _ in tokens]
            top = tuple(zip(tokens[1:], logprobs[1:], strict=True))
            token, score = tokens[0], TokenScore(logprobs[0], 1, top)
            chat = serializer.chat([(token, score)]).model_dump()
            assert json.loads(serializer.chat_json(token, score)) == chat
            completion = serializer.completion([(token, score)], [7]).model_dump()
            assert json.loads(serializer.completion_json(token, score, 7)) == completion


@pytest.mark.parametrize(
    ("path", "n_top"),
    [(COMPLETIONS, {"logprobs": 5}), (CHAT, {"logprobs": True, "top_logprobs": 20})],
)
async def test_a_stream_has_what_the_whole_answer_has(
    client: httpx.AsyncClient, events_of: Events, path: str, n_top: dict[str, Any]
) -> None:
    body = (PROMPT if path == COMPLETIONS else HELLO) | {"max_tokens": 12} | n_top
    (whole,) = (await post(client, path, body))["choices"]
    text = (await client.post(path, json={**body, "stream": True})).text
    choices = [event["choices"][0] for event in events_of(text)[:-1] if event["choices"]]
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    for name, listed in whole["logprobs"].items():
        if listed is not None:
            assert [each for one in told for each in one[name]] == listed
