"""Thoughts between <think> and </think> are told apart from the answer."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from halfmoon_conductor.engine_io.engine_request import ReasoningStart
from halfmoon_conductor.reasoning.reasoning_parser import ReasoningParser
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import CHAT, HELLO, MESSAGES, RESPONSES, Front, open_front
from tests.nightly import by_day

#: As Qwen3's: the model writes the first marker, unless thinking is switched off.
QWEN = """\
{%- for message in messages %}
{{- '<|turn|>' + message.role + ':' }}
{%- if message.reasoning_content is defined %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{{- message.content + '<|end|>' }}
{%- endfor %}
{%- if tools %}{{ '<tool_call>' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant:' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
#: As DeepSeek-R1's: the prompt ends with the marker.
DEEPSEEK = QWEN.replace("'<|turn|>assistant:' }}", "'<|turn|>assistant:<think>\\n' }}")
#: It has no word of thoughts.
PLAIN = "{% for message in messages %}{{ message.role + ':' + message.content }}{% endfor %}"
THOUGHT = "Half or full? 半月"
F = {"name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
SAYS = f"<think>\n{THOUGHT}\n</think>\n\nHalf.{CALL}"
OpenApp = Callable[..., Any]


@pytest.fixture
def open_app(bpe: Tokenizer, tmp_path: Path, gateway: ScriptedGateway) -> OpenApp:
    """Open an app whose model has a chat template and says a text."""

    @asynccontextmanager
    async def opened(template: str, says: str = "Half.", **settings: Any) -> AsyncIterator[Front]:
        bpe.save(str(tmp_path / "tokenizer.json"))
        config = {"eos_token": "<|end|>", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
        gateway.requests.clear()
        async with open_front(gateway, HubTokenizer(tmp_path), **settings) as front:
            front.says(says)
            yield front

    return opened


def openais(front: Front) -> openai.AsyncOpenAI:
    """OpenAI's library."""
    client = cast(Any, front.client)
    return openai.AsyncOpenAI(base_url="http://front/v1", api_key="none", http_client=client)


async def message_of(front: Front, **fields: Any) -> Any:
    return (await front.choice(CHAT, fields))["message"]


async def streamed(front: Front, **fields: Any) -> tuple[str, str, Any]:
    """Thoughts and text of a stream, and its last usage, as OpenAI's library reads it."""
    asked: Any = {"model": "lab/moon", "messages": HELLO, **fields}
    stream = await openais(front).chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    thoughts, text, usage = "", "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            thought = getattr(choice.delta, "reasoning_content", None) or ""
            assert not (thought and text), "a thought after the answer began"
            thoughts, text = thoughts + thought, text + (choice.delta.content or "")
    return thoughts, text, usage


@pytest.mark.parametrize(("template", "begin"), [(QWEN, "<think>\n"), (DEEPSEEK, "")])
async def test_thoughts_are_a_field_of_their_own_whole_and_streamed(
    open_app: OpenApp, template: str, begin: str
) -> None:
    async with open_app(template, f"{begin}{THOUGHT}\n</think>\n\nHalf.") as front:
        body = await front.ask(CHAT)
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, "Half.")
        n_thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < n_thought < body["usage"]["completion_tokens"]
        thoughts, text, usage = await streamed(front)
        assert (thoughts, text) == (THOUGHT, "Half.")
        assert usage.completion_tokens_details.reasoning_tokens == n_thought


async def test_an_answer_without_thoughts_has_none(open_app: OpenApp) -> None:
    async with open_app(QWEN, "Half. <think>no</think>") as front:
        message = await message_of(front)
        assert message["content"] == "Half. <think>no</think>"
        assert message["reasoning_content"] is None
        await message_of(front, chat_template_kwargs={"enable_thinking": False})
        await message_of(front, reasoning_effort="none")
        prompts = {request.prompt_token_ids for request in front.gateway.requests}
        assert len(prompts) == 2, "both switch thinking off in the same way"


async def test_an_answer_that_is_cut_off_in_its_thoughts_has_no_content(open_app: OpenApp) -> None:
    async with open_app(DEEPSEEK, "Half or full?") as front:
        choice = await front.choice(CHAT, max_tokens=3)
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] is None
        thought = choice["message"]["reasoning_content"]
        assert "Half or full?".startswith(thought)
        assert (await streamed(front, max_tokens=3))[:2] == (thought, "")


async def test_calls_of_tools_come_after_thoughts(open_app: OpenApp) -> None:
    async with open_app(QWEN, f"<think>I call <tool_call> now</think>\n{CALL}") as front:
        choice = await front.choice(CHAT, tools=[{"type": "function", "function": F}])
        assert choice["message"]["reasoning_content"] == "I call <tool_call> now"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
        assert choice["finish_reason"] == "tool_calls"


async def test_a_grammar_leaves_no_room_for_thoughts(open_app: OpenApp) -> None:
    async with open_app(DEEPSEEK, '{"a": 1}') as front:
        message = await message_of(front, response_format={"type": "json_object"})
        assert message["content"] == '{"a": 1}'
        assert "reasoning_content" not in message


async def test_settings_turn_it_off_or_on_where_the_template_shows_nothing(
    open_app: OpenApp,
) -> None:
    for template, parser, content in (
        (QWEN, "none", "<think>a</think>b"),
        (PLAIN, "auto", "<think>a</think>b"),
        (PLAIN, "think", "b"),
    ):
        async with open_app(template, "<think>a</think>b", reasoning_parser=parser) as front:
            message = await message_of(front)
            assert message["content"] == content
            assert message.get("reasoning_content") == ("a" if parser == "think" else None)


# -- the other APIs ------------------------------------------------------------------------------


async def test_a_response_has_an_item_for_thoughts_whole_and_streamed(open_app: OpenApp) -> None:
    async with open_app(QWEN, SAYS) as front:
        ours = openais(front)
        asked: Any = {"model": "lab/moon", "input": "Hi", "tools": [{"type": "function", **F}]}
        whole = await ours.responses.create(**asked)
        thought, message, call = whole.output
        assert thought.type == "reasoning" and thought.content is not None
        assert [part.text for part in thought.content] == [THOUGHT]
        assert (message.type, call.type) == ("message", "function_call")
        assert whole.output_text == "Half."
        assert whole.usage is not None
        n_thought = whole.usage.output_tokens_details.reasoning_tokens
        assert 0 < n_thought < whole.usage.output_tokens

        events = [event async for event in await ours.responses.create(**asked, stream=True)]
        assert events[-1].type == "response.completed"
        ended = events[-1].response
        assert [item.type for item in ended.output] == ["reasoning", "message", "function_call"]
        assert ended.usage == whole.usage
        for kind, text in (("reasoning_text", THOUGHT), ("output_text", "Half.")):
            deltas = [e.delta for e in events if e.type == f"response.{kind}.delta"]
            (done,) = [e.text for e in events if e.type == f"response.{kind}.done"]
            assert "".join(deltas) == done == text
        added = [e.item for e in events if e.type == "response.output_item.added"]
        assert [item.id for item in added] == [item.id for item in ended.output]


async def test_a_message_has_a_block_for_thoughts_whole_and_streamed(open_app: OpenApp) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    async with open_app(QWEN, SAYS) as front:
        thought, text, use = (await front.ask(MESSAGES, tools=tools))["content"]
        assert thought == {"type": "thinking", "thinking": THOUGHT, "signature": ""}
        assert (text["text"], use["name"]) == ("Half.", "f")

        events = await front.stream(MESSAGES, tools=tools)
        started = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        assert [block["type"] for block in started] == ["thinking", "text", "tool_use"]
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        thoughts = [d["thinking"] for d in deltas if d["type"] == "thinking_delta"]
        assert "".join(thoughts) == thought["thinking"]
        assert deltas[len(thoughts)] == {"type": "signature_delta", "signature": ""}
        stops = [e["index"] for e in events if e["type"] == "content_block_stop"]
        assert stops == [0, 1, 2]


async def test_thoughts_are_echoed_in_every_api(open_app: OpenApp) -> None:
    async with open_app(QWEN) as front:

        async def n_prompt(path: str, **fields: Any) -> int:
            await front.ask(path, fields)
            return len(front.last.prompt_token_ids)

        again = {"role": "user", "content": "Sure?"}
        said = {"role": "assistant", "content": "Half."}
        without = await n_prompt(CHAT, messages=[*HELLO, said, again])
        thought = {**said, "reasoning_content": THOUGHT}
        expected = await n_prompt(CHAT, messages=[*HELLO, thought, again])
        assert expected > without

        content = [{"type": "reasoning_text", "text": THOUGHT}]
        summary = [{"type": "summary_text", "text": THOUGHT}]
        for item in (
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": content},
            {"type": "reasoning", "summary": summary, "encrypted_content": "gAAA"},
        ):
            items = [*HELLO, item, {"type": "message", **said}, again]
            assert await n_prompt(RESPONSES, input=items) == expected

        blocks: list[Any] = [
            {"type": "thinking", "thinking": THOUGHT, "signature": ""},
            {"type": "redacted_thinking", "data": "gAAA"},
            {"type": "text", "text": "Half."},
        ]
        turns = [*HELLO, {"role": "assistant", "content": blocks}, again]
        assert await n_prompt(MESSAGES, messages=turns) == expected


async def test_a_call_keeps_the_thoughts_before_it(open_app: OpenApp) -> None:
    template = QWEN.replace("{{- message.content", "{{- (message.content or '')")
    async with open_app(template) as front:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c", "output": "1"}
        summary = [{"type": "summary_text", "text": "a b c"}]
        for items in ([call, output], [{"type": "reasoning", "summary": summary}, call, output]):
            await front.ask(RESPONSES, input=[*HELLO, *items])
        without, with_thoughts = (len(r.prompt_token_ids) for r in front.gateway.requests)
        assert with_thoughts > without


async def test_thinking_is_switched_in_messages(open_app: OpenApp) -> None:
    default_off = QWEN.replace("is defined and not", "is not defined or not")
    for template, kind in ((QWEN, "disabled"), (default_off, "enabled")):
        async with open_app(template) as front:
            thinking = {"type": kind, "budget_tokens": 1024}
            for fields in ({}, {"thinking": {"type": "adaptive"}}, {"thinking": thinking}):
                await front.ask(MESSAGES, fields)
            plain, adaptive, switched = (r.prompt_token_ids for r in front.gateway.requests)
            assert plain == adaptive
            longer, shorter = (switched, plain) if kind == "disabled" else (plain, switched)
            assert len(longer) > len(shorter)


# -- the parser ----------------------------------------------------------------------------------


def taken_apart(start: ReasoningStart, texts: Sequence[str]) -> tuple[str, str]:
    parser = ReasoningParser(start)
    read = [*map(parser.feed, texts), parser.finish()]
    return "".join(thought for thought, _ in read), "".join(text for _, text in read)


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "think", "/", ">", "\n", " ", "a", "半", "</th"]),
    max_size=12,
).map("".join)


@settings(max_examples=by_day(25, at_night=1000))
@given(st.sampled_from(["begun", "possible"]), PIECES, st.data())
def test_it_does_not_matter_how_an_answer_is_cut_into_pieces(
    start: ReasoningStart, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    ends = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(ends)]
    thoughts, answer = taken_apart(start, pieces)
    assert (thoughts.rstrip(), answer) == tuple(
        part if i else part.rstrip() for i, part in enumerate(taken_apart(start, [text]))
    )
    # Nothing is lost but markers and whitespace beside them.
    shown = "".join((thoughts + answer).split())
    rest = text.lstrip()
    if start == "possible" and not text.lstrip().startswith("<think>"):
        assert (thoughts, answer) == ("", text)
    else:
        rest = rest.removeprefix("<think>") if start == "possible" else rest
        # Of two parts of a marker with whitespace between them, none is a marker.
        assert shown == "".join(rest.replace("</think>", "", 1).split())
