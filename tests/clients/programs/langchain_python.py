"""langchain-openai."""

import os
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, key, model = (os.environ[f"HALFMOON_{name}"] for name in ("URL", "KEY", "MODEL"))
chat = ChatOpenAI(
    base_url=f"{url}/v1", api_key=key, model=model, temperature=0, max_tokens=8, stream_usage=True
)
answer = chat.invoke("Hello")
assert answer.usage_metadata["output_tokens"] >= 1
parts = list(chat.stream("Hello"))
assert "".join(part.text for part in parts) == answer.text
assert any(part.usage_metadata for part in parts)


class Moon(BaseModel):
    """What is to be said of the moon."""

    phase: Literal["half", "full"]
    lit: bool


for responses in (False, True):
    asking = ChatOpenAI(
        base_url=f"{url}/v1", api_key=key, model=model, temperature=0, max_tokens=300,
        use_responses_api=responses, metadata={"client": "langchain"},
    )  # fmt: skip
    # Strict tools, which must be called and which may be.
    for choice in ("any", "auto"):
        bound = asking.bind_tools(
            [Moon], strict=True, tool_choice=choice, parallel_tool_calls=False
        )
        said = bound.invoke("Hello")
        assert not said.invalid_tool_calls
        assert said.tool_calls or (choice == "auto" and said.text)
        for call in said.tool_calls:
            Moon.model_validate(call["args"])
    for method in ("json_schema", "function_calling"):
        reader = asking.with_structured_output(Moon, method=method, strict=True)
        assert isinstance(reader.invoke("Hello"), Moon)
