"""Log probabilities as clients read them."""

import json
import random
from math import inf
from typing import Any

import pytest

from halfmoon_conductor.api.openai.logprob_serializer import LogprobSerializer
from halfmoon_conductor.text.fake_tokenizer import FakeTokenizer
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_testing.conductor_http import scripted_score
from tests.conductor.fronts import CHAT, COMPLETIONS, Front

PROMPT: dict[str, Any] = {"prompt": [72, 80], "max_tokens": 100}


async def test_a_completion_names_each_token_with_the_likeliest_beside_it(
    front: Front, tokenizer: HubTokenizer
) -> None:
    told = (await front.choice(COMPLETIONS, PROMPT, logprobs=2))["logprobs"]
    script = front.gateway.script
    written = [tokenizer.token_bytes(token) for token in script]
    texts = [each.decode(errors="replace") for each in written]
    assert told["tokens"] == texts
    assert texts[-1] == "<|end|>"
    scores = [scripted_score(token, 2).logprob for token in script]
    assert told["token_logprobs"] == scores
    assert told["text_offset"] == [
        len(b"".join(written[:i]).decode(errors="ignore")) for i in range(len(texts))
    ]
    for text, top, score in zip(texts, told["top_logprobs"], scores, strict=True):
        assert top.pop(text, score) in (score, -0.5, -1.0)
        assert set(top.values()) <= {-0.5, -1.0}


async def test_an_echo_has_those_of_the_prompt_too_and_null_for_its_first_token(
    front: Front,
) -> None:
    body = {**PROMPT, "logprobs": 1, "echo": True, "max_tokens": 2}
    whole = (await front.choice(COMPLETIONS, body))["logprobs"]
    tokens = (80, *front.gateway.script[:2])
    expected = [None, *(scripted_score(token, 1).logprob for token in tokens)]
    assert whole["token_logprobs"] == expected
    assert whole["top_logprobs"][0] is None
    assert front.last.sampling.prompt_logprobs == 1
    chunks = await front.choices(COMPLETIONS, body, stream=True)
    for name in whole:
        assert [each for chunk in chunks for each in chunk["logprobs"][name]] == whole[name]


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_count_characters_whatever_tokens_they_have(
    front: Front, tokenizer: HubTokenizer, stream: bool
) -> None:
    """A moon has several tokens, and they have its offset; a stop token comes behind the text."""
    front.says("é 🌗 half 半")
    prompt = "🌘<|end|>moon é"
    body = {"prompt": prompt, "logprobs": 0, "echo": True, "max_tokens": 50}
    choices = await front.choices(COMPLETIONS, body, stream=stream)
    text = "".join(choice["text"] for choice in choices)
    assert text == f"{prompt}é 🌗 half 半"
    offsets = [each for choice in choices for each in choice["logprobs"]["text_offset"]]
    wanted, seen = [], b""
    for token in (*front.last.prompt_token_ids, *front.gateway.script[:-1]):
        wanted.append(len(seen.decode(errors="ignore")))
        seen += tokenizer.token_bytes(token)
    assert offsets == [*wanted, len(text)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 50])
async def test_an_echo_of_tokens_cut_inside_a_character_goes_on_within_it(
    front: Front, tokenizer: HubTokenizer, stream: bool, max_tokens: int
) -> None:
    whole = tokenizer.encode("a moon 🌗 is half 半", add_special_tokens=False)
    ends = [tokenizer.decode(whole[:n]).endswith("\ufffd") for n in range(len(whole))]
    assert any(ends)
    for cut in (n for n, is_inside in enumerate(ends) if is_inside):
        front.gateway.script = [*whole[cut:], 0]
        body = {"prompt": whole[:cut], "echo": True, "logprobs": 0, "max_tokens": max_tokens}
        choices = await front.choices(COMPLETIONS, body, stream=stream)
        text = "".join(choice["text"] for choice in choices)
        assert text == tokenizer.decode(whole if max_tokens else whole[:cut])
        offsets = [each for choice in choices for each in choice["logprobs"]["text_offset"]]
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(text)


async def test_a_chat_names_tokens_with_their_bytes(front: Front, tokenizer: HubTokenizer) -> None:
    told = (await front.choice(CHAT, logprobs=True, top_logprobs=2))["logprobs"]["content"]
    written = [tokenizer.token_bytes(token) for token in front.gateway.script]
    assert [bytes(each["bytes"]) for each in told] == written
    assert all(len(each["top_logprobs"]) == 2 for each in told)


async def test_prompt_logprobs_are_told_by_token_id(front: Front) -> None:
    choice = await front.choice(COMPLETIONS, PROMPT, prompt_logprobs=1)
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert set(second) == {"80", "70"}
    assert second["80"]["logprob"] == scripted_score(80, 1).logprob
    assert second["70"]["rank"] == 1
    assert len((await front.ask(CHAT, prompt_logprobs=0))["prompt_logprobs"]) > 1


async def test_token_ids_are_given_beside_the_text(front: Front) -> None:
    for path, fields in ((COMPLETIONS, PROMPT), (CHAT, {})):
        answer = await front.ask(path, fields, return_token_ids=True)
        *chunks, _ = await front.stream(path, fields, return_token_ids=True)
        (choice,) = answer["choices"]
        parts = [chunk["choices"][0] for chunk in chunks]
        script = list(front.gateway.script)
        assert choice["token_ids"] == script
        assert [each for part in parts for each in part.get("token_ids") or ()] == script
        told, streamed = (choice, parts[0]) if path == COMPLETIONS else (answer, chunks[0])
        prompt = list(front.last.prompt_token_ids)
        assert told["prompt_token_ids"] == streamed["prompt_token_ids"] == prompt


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


async def test_too_many_scores_for_one_message_are_refused(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon_conductor.inputs.input_processor.MAX_PROMPT_SCORES", 500)
    asked = {"max_tokens": 1, "prompt_logprobs": 20}
    await front.ask(COMPLETIONS, asked, prompt=[70] * 20)
    for more in ({"prompt": [70] * 199}, {"prompt": [70] * 20, "n": 2}):
        assert "over the 500 " in (await front.refused(COMPLETIONS, asked, **more))["message"]


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
