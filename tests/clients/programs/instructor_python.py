"""instructor: answers read into a class, in each of its modes for OpenAI's API."""

import os
from typing import Literal

import instructor
from instructor import Mode, Partial
from instructor.core import IncompleteOutputException
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

url, key, model = (os.environ[f"HALFMOON_{name}"] for name in ("URL", "KEY", "MODEL"))
hello = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]


class Moon(BaseModel):
    """What is to be said of the moon."""

    # Else a small model goes on with members of its own.
    model_config = ConfigDict(extra="forbid")
    phase: Literal["half", "full"]
    lit: bool


def client_of(mode: Mode) -> instructor.Instructor:
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    return instructor.from_openai(client, mode=mode)


#: Its requests of one answer: a small model would call again and again.
ONE_CALL = {"parallel_tool_calls": False}
asked = {"model": model, "messages": hello, "temperature": 0, "max_tokens": 300, "max_retries": 0}
for mode, more in (
    (Mode.TOOLS, ONE_CALL),
    (Mode.TOOLS_STRICT, ONE_CALL),
    (Mode.JSON_SCHEMA, {}),
):
    client = client_of(mode)
    moon, whole = client.chat.completions.create_with_completion(
        response_model=Moon, **asked, **more
    )
    assert isinstance(moon, Moon)
    assert whole.usage.completion_tokens >= 1
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    # The same as it grows: what that asks for is a class of another name.
    partial = client.chat.completions.create(response_model=Partial[Moon], **asked, **more)
    *_, last = client.chat.completions.create_partial(response_model=Moon, **asked, **more)
    assert last.model_dump() == Moon.model_validate(partial.model_dump()).model_dump()

# Without a class the answer is text, whole and streamed.
plain = {**asked, "max_tokens": 8, "response_model": None}
said = client_of(Mode.TOOLS).chat.completions.create(**plain)
chunks = client_of(Mode.TOOLS).chat.completions.create(**plain, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == said.choices[0].message.content

# An answer that is cut off is an error.
try:
    client_of(Mode.TOOLS).chat.completions.create(
        response_model=Moon, **{**asked, "max_tokens": 8}, **ONE_CALL
    )
except IncompleteOutputException as error:
    assert error.last_completion.choices[0].finish_reason == "length"
else:
    raise AssertionError("a call that was cut off was read as a whole one")
