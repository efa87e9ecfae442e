"""llama-index, by its class for servers like this one."""

import os
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
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


# Chats, whole and streamed.
short = llm(max_tokens=8, additional_kwargs={"stream_options": {"include_usage": True}})
whole = short.chat(hello)
assert whole.raw.usage.completion_tokens >= 1
parts = list(short.stream_chat(hello))
assert "".join(part.delta for part in parts) == whole.message.content
assert parts[-1].raw.usage.completion_tokens == whole.raw.usage.completion_tokens
assert parts[-1].message.content == whole.message.content

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
