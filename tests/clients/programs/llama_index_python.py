"""llama-index, by its class for servers like this one."""

import asyncio
import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from openai import AuthenticationError, NotFoundError
from pydantic import BaseModel, ConfigDict

url, key, model = (os.environ[f"HALFMOON_{name}"] for name in ("URL", "KEY", "MODEL"))
hello = [ChatMessage(role="system", content="Be brief"), ChatMessage(role="user", content="Hello")]


class Moon(BaseModel):
    """What is to be said of the moon."""

    model_config = ConfigDict(extra="forbid")
    phase: Literal["half", "full"]
    lit: bool


def look(phase: Literal["half", "full"], lit: bool) -> str:
    """Look at the moon."""
    assert phase in ("half", "full")
    assert isinstance(lit, bool)
    return "It is there."


def llm(**more: object) -> OpenAILike:
    settings = {
        "model": model, "api_base": f"{url}/v1", "api_key": key, "temperature": 0, "max_retries": 0,
        "is_chat_model": True, "is_function_calling_model": True, "context_window": 2048, **more,
    }  # fmt: skip
    return OpenAILike(**settings)


async def main() -> None:
    # Chats, whole and streamed, and asynchronously.
    short = llm(max_tokens=8, additional_kwargs={"stream_options": {"include_usage": True}})
    whole = short.chat(hello)
    assert whole.raw.usage.completion_tokens >= 1
    parts = list(short.stream_chat(hello))
    assert "".join(part.delta for part in parts) == whole.message.content
    assert parts[-1].raw.usage.completion_tokens == whole.raw.usage.completion_tokens
    assert parts[-1].message.content == whole.message.content
    assert (await short.achat(hello)).message.content == whole.message.content
    deltas = [part.delta async for part in await short.astream_chat(hello)]
    assert "".join(deltas) == whole.message.content

    # Completions, which are no chats.
    raw = llm(max_tokens=8, is_chat_model=False, is_function_calling_model=False)
    completed = raw.complete("Hello")
    *_, last = raw.stream_complete("Hello")
    assert last.text == completed.text

    # A conversation goes on.
    next_turns = [*hello, whole.message, ChatMessage(role="user", content="And then?")]
    assert short.chat(next_turns).raw.usage.prompt_tokens > whole.raw.usage.prompt_tokens

    # Answers of a class, by way of a tool and by way of the answer's form.
    prompt = PromptTemplate("Hello, {name}")
    calling, forming = (
        llm(max_tokens=300, should_use_structured_outputs=forms) for forms in (False, True)
    )
    assert isinstance(calling.structured_predict(Moon, prompt, name="moon"), Moon)
    moon = forming.structured_predict(Moon, prompt, name="moon")
    # As a stream by its form alone: llama-index leaves it to the model whether to call then.
    *_, last = forming.stream_structured_predict(Moon, prompt, name="moon")
    assert Moon.model_validate(last.model_dump()) == moon

    # A tool that must be called, whole and streamed, and what it gave.
    tool = FunctionTool.from_defaults(look)
    for strict in (True, False):
        asked = {"tools": [tool], "chat_history": hello, "tool_required": True, "strict": strict}
        called = calling.chat_with_tools(**{**asked, "chat_history": list(hello)})
        (call,) = calling.get_tool_calls_from_response(called)
        assert call.tool_name == "look"
        result = tool(**call.tool_kwargs)
        *_, last = calling.stream_chat_with_tools(**{**asked, "chat_history": list(hello)})
        (streamed,) = calling.get_tool_calls_from_response(last)
        assert streamed.tool_kwargs == call.tool_kwargs
    given = ChatMessage(
        role="tool", content=str(result), additional_kwargs={"tool_call_id": call.tool_id}
    )
    after = short.chat_with_tools(
        tools=[tool], chat_history=[*hello, called.message, given], tool_choice="none"
    )
    assert isinstance(after.message.content, str)

    # Responses.
    responses = OpenAILikeResponses(
        model=model, api_base=f"{url}/v1", api_key=key, temperature=0, max_output_tokens=8,
        max_retries=0, context_window=2048,
    )  # fmt: skip
    assert responses.chat(hello).message.content == whole.message.content
    deltas = [part.delta or "" for part in responses.stream_chat(hello)]
    assert "".join(deltas) == whole.message.content

    # Errors.
    for wrong, kind, says in (
        ({"model": "other"}, NotFoundError, "other"),
        ({"api_key": "wrong"}, AuthenticationError, "key"),
    ):
        try:
            llm(max_tokens=8, **wrong).chat(hello)
        except kind as error:
            assert says in error.message
        else:
            raise AssertionError(f"{wrong} was served")


asyncio.run(main())
