"""Chats as the published chat templates of many families write them: as in transformers."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from halfmoon_conductor.api.openai.openai_requests import ChatRequest
from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.inputs.prompt_encoder import PromptEncoder
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.models.published_templates import TEMPLATE_FAMILIES, templates_of

Message = dict[str, Any]

CALL_ID = "husum0001"
TIDES = {
    "harbour": {"type": "string", "description": "Größe egal"},
    "days": {"type": "array", "items": {"type": "integer"}},
    "unit": {"type": "string", "enum": ["m", "ft"], "default": "m"},
    "exact": {"type": ["boolean", "integer"]},
    "area": {"type": "object", "properties": {"north": {"type": "number"}}},
}


def tool(name: str, description: str, properties: Any, **more: Any) -> Message:
    schema = {"type": "object", "properties": properties, **more}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("tides", "Gezeiten eines Hafens — <low & high>", TIDES, required=["harbour"]),
    tool("moon", "半月", {}),
]
SYSTEM = {"role": "system", "content": "Sei knapp – 简短。"}
THOUGHT = "It asks for the <tide>.\n"


def called(name: str = "tides", **more: Any) -> Message:
    arguments = {"harbour": "Büsum “Nord”", "days": [1, 2], "exact": None}
    function = {"name": name, "arguments": arguments if name == "tides" else {}}
    call = {"id": CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call], **more}


def result(text: str = '{"low": "06:12", "at": "Büsum"}') -> Message:
    return {"role": "tool", "tool_call_id": CALL_ID, "content": text}


def said(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def asked(text: str) -> Message:
    return {"role": "user", "content": text}


TURNS = [asked("When is the tide low? "), said("At six."), asked("And high, 半?")]
CALLS = [
    asked("When is the tide low?"),
    called(),
    result(),
    said("At 06:12."),
    asked("And the moon?"),
    called("moon", content="Let me see."),
    result("half"),
    said("Half."),
    asked("Thanks – 谢谢!"),
]
THOUGHTS = [
    asked("Tide?"),
    said("Low.", reasoning_content=THOUGHT),
    asked("Sure?"),
    called(reasoning_content=THOUGHT),
    result(),
]
#: Conversations by what is in them: messages, and other fields of the request.
CHATS: dict[str, tuple[list[Message], dict[str, Any]]] = {
    "plain": (TURNS, {}),
    "system": ([SYSTEM, *TURNS], {}),
    "tools, none called": ([SYSTEM, *TURNS], {"tools": TOOLS}),
    "tools without a system message": (TURNS, {"tools": TOOLS[:1]}),
    "calls": ([SYSTEM, *CALLS], {"tools": TOOLS}),
    "calls without tools": (CALLS, {}),
    "a result at the end": ([SYSTEM, *CALLS[:3]], {"tools": TOOLS}),
    "thoughts": (THOUGHTS, {"tools": TOOLS}),
    "thoughts in the text": ([asked("Tide?"), said("<think>\nHm.\n</think>\n\nLow."), *TURNS], {}),
    "thinking off": (TURNS, {"chat_template_kwargs": {"enable_thinking": False}}),
    "thinking on": (TURNS, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
    "no turn begun": ([*TURNS, said("At noon.")], {"add_generation_prompt": False}),
    "a turn continued": ([*TURNS, said("At")], {"continue_final_message": True}),
    "documents": (TURNS, {"documents": [{"doc_id": 1, "title": "T", "text": "Low at six."}]}),
    "names of its own": (TURNS, {"chat_template_kwargs": {"xml_tools": TOOLS, "controls": {}}}),
}
#: Families whose templates add to a call's arguments as to a text, or need a content beside it.
TEXT_ARGUMENTS = {"deepseek_r1"}


@pytest.fixture(scope="module")
def encoder_of(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], PromptEncoder]:
    """The conductor's encoder of a family."""
    card = ModelCard(name="m", max_context=100_000, created=0, fingerprint="")
    made: dict[str, PromptEncoder] = {}

    def encoder(family: str) -> PromptEncoder:
        if family not in made:
            folder = tmp_path_factory.mktemp("family") / "model"
            shutil.copytree(model_folder, folder)
            named = [{"name": n, "template": t} for n, t in templates_of(family).items()]
            config = {**SPECIAL_TOKENS, "chat_template": named}
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            made[family] = PromptEncoder(lambda: card, HubTokenizer(folder), "hermes")
        return made[family]

    return encoder


SPECIAL_TOKENS = {"bos_token": "<|turn|>", "eos_token": "<|end|>"}


@cache
def reference_of(bpe: Tokenizer, family: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe, chat_template=templates_of(family), **SPECIAL_TOKENS
    )


def expected(
    bpe: Tokenizer, family: str, messages: list[Message], fields: dict[str, Any]
) -> list[int] | None:
    """What transformers makes of a chat; None: the template refuses it."""
    switches = dict(fields)
    variables = switches.pop("chat_template_kwargs", {})
    if "continue_final_message" not in switches:
        switches.setdefault("add_generation_prompt", True)
    options = {"return_dict": False, "tokenize": True, **switches, **variables}
    try:
        return list(reference_of(bpe, family).apply_chat_template(messages, **options))
    except Exception:
        return None


def in_reference(family: str, message: Message) -> Message:
    """The message as the family's template has to get it."""
    if family not in TEXT_ARGUMENTS or "tool_calls" not in message:
        return message
    return {"content": "", **as_sent(message)}


def as_sent(message: Message) -> Message:
    """The message as clients of OpenAI's API send it."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(args)}}
        for call in message["tool_calls"]
        if isinstance(args := call["function"]["arguments"], dict)
    ]
    return {**message, "tool_calls": calls}


#: Families whose templates know no calls, and those that know them only beside tools.
WITHOUT_CALLS = {
    "gemma2", "gemma3", "phi3.5", "phi4", "phi4_mini", "mixtral", "smollm2", "olmo2", "chatml",
}  # fmt: skip
CALLS_BESIDE_TOOLS = {"falcon3", "hermes", "command_r"}


@pytest.mark.parametrize("family", TEMPLATE_FAMILIES)
def test_chats_have_transformers_tokens(
    bpe: Tokenizer, encoder_of: Callable[[str], PromptEncoder], family: str
) -> None:
    refused = set()
    for chat, (messages, fields) in CHATS.items():
        tokens = expected(bpe, family, [in_reference(family, each) for each in messages], fields)
        body = {"model": "m", "messages": list(map(as_sent, messages)), **fields}
        request = ChatRequest.model_validate(body)
        if tokens is None:
            refused.add(chat)
            with pytest.raises(InvalidRequest):
                encoder_of(family).encode_conversation(request)
        else:
            assert encoder_of(family).encode_conversation(request) == tokens, chat
    # Only what the family's template does not know is refused, by both.
    known = set()
    if family in WITHOUT_CALLS:
        known = {"calls", "calls without tools", "a result at the end", "thoughts"}
    if family in CALLS_BESIDE_TOOLS:
        known = {"calls without tools"}
    assert refused == known | ({"system", "tools, none called"} if family == "gemma2" else set())
