"""pydantic-ai: output types, by way of a strict tool and by way of the answer's form."""

import asyncio
import os
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext, Tool, ToolDefinition, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, key, model = (os.environ[f"HALFMOON_{name}"] for name in ("URL", "KEY", "MODEL"))


class Moon(BaseModel):
    """What an answer has to be."""

    phase: Literal["half", "full"]
    lit: bool


def look(lit: bool) -> str:
    """Look at the moon."""
    assert isinstance(lit, bool)
    return "It is there."


async def first_step(context: RunContext[None], tool: ToolDefinition) -> ToolDefinition | None:
    return replace(tool, strict=True) if context.run_step == 1 else None


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    settings = {"temperature": 0.0, "max_tokens": 300, "parallel_tool_calls": False}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        asking = kind(model, provider=provider)
        for output in (Moon, ToolOutput(Moon, strict=True), NativeOutput(Moon, strict=True)):
            agent = Agent(asking, output_type=output, instructions="Be brief")
            result = await agent.run("Hello", model_settings=settings)
            assert isinstance(result.output, Moon)
            assert result.usage.output_tokens > 0

            async with agent.run_stream("Hello", model_settings=settings) as stream:
                assert isinstance(await stream.get_output(), Moon)

        # A tool beside the output, for the first step: a small model would call it for ever.
        agent = Agent(asking, output_type=Moon, tools=[Tool(look, prepare=first_step)])
        result = await agent.run("Hello", model_settings=settings)
        assert isinstance(result.output, Moon)


asyncio.run(main())
