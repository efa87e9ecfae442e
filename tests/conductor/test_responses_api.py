"""OpenAI's Responses API, of text and without state."""

from typing import Any

import pytest

from tests.conductor.fronts import CHAT, RESPONSES, TEXT, Front, events_of


async def test_an_input_is_answered_whole(front: Front) -> None:
    front.gateway.n_cached = 2
    answer = await front.ask(RESPONSES, instructions="Be brief", temperature=0.5)
    assert answer["id"].startswith("resp_")
    (item,) = answer["output"]
    assert item["content"] == [
        {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    ]
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert (answer["instructions"], answer["temperature"]) == ("Be brief", 0.5)
    n_prompt, n_new = len(front.last.prompt_token_ids), len(front.gateway.script)
    assert answer["usage"] == {
        "input_tokens": n_prompt,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": n_new,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n_prompt + n_new,
    }


@pytest.mark.parametrize("limit", [None, 3])
async def test_a_streams_events_are_numbered_and_say_what_the_whole_answer_says(
    front: Front, limit: int | None
) -> None:
    whole = await front.ask(RESPONSES, max_output_tokens=limit)
    streamed = await front.post(RESPONSES, max_output_tokens=limit, stream=True)
    assert streamed.text.startswith("event: response.created\n")
    events = events_of(streamed.text)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    ended = "incomplete" if limit else "completed"
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", ended]
    assert whole["status"] == whole["output"][0]["status"] == ended
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if limit else None)
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(each["delta"] for each in events[4:-4]) == text == events[-4]["text"]
    last = events[-1]["response"]
    assert last["usage"] == whole["usage"]
    assert events[0]["response"]["id"] == last["id"]
    assert events[-2]["item"] == last["output"][0]


IMAGE = {"role": "user", "content": [{"type": "input_image", "text": ""}]}
BROKEN = {"type": "json_schema", "name": "s", "schema": {"type": "moon"}}


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": None}, "input", "a string or a list"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "not supported"),
        ({"text": {"format": BROKEN}}, "text", "text does not compile"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0].type", "only message"),
        ({"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content", "list"),
        ({"input": [IMAGE]}, "input[0].content[0].type", "not supported"),
        ({"mood": "a"}, "mood", "not known"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    front: Front, change: dict[str, Any], param: str, told: str
) -> None:
    error = await front.refused(RESPONSES, change)
    assert error["param"] == param and told in error["message"]


async def test_an_error_in_mid_stream_is_the_last_event(front: Front) -> None:
    front.gateway.failure = RuntimeError("swordfish")
    *_, last = await front.stream(RESPONSES)
    assert (last["type"], last["error"]["type"]) == ("error", "server_error")
    assert "swordfish" not in str(last)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}


async def test_a_format_is_what_chats_have_under_another_name_and_the_answer_repeats_it(
    front: Front,
) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    for ours, chats in (
        (STRICT, wrapped),
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "text"}, {"type": "text"}),
    ):
        answer = await front.ask(RESPONSES, text={"format": ours})
        assert answer["text"]["format"] == ours
        grammar = front.grammar
        await front.ask(CHAT, response_format=chats)
        assert grammar == front.grammar
        assert bool(grammar) == (ours["type"] != "text")


async def test_a_response_repeats_its_labels_and_says_what_was_done(front: Front) -> None:
    labels = {
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "user": "u",
        "reasoning": {"effort": "low", "summary": None},
    }
    answer = await front.ask(RESPONSES, labels, service_tier="flex", store=True)
    done = {"service_tier": "default", "store": True, "background": False}
    assert {name: answer[name] for name in labels | done} == labels | done
