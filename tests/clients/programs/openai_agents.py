"""The OpenAI Agents SDK: an agent that calls a tool and goes on with what it gave.

Its tools are strict, so whatever a model with small weights says, the arguments are valid.
"""

import asyncio
import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, key, model = (os.environ[f"HALFMOON_{name}"] for name in ("URL", "KEY", "MODEL"))
set_tracing_disabled(disabled=True)
seen: list[tuple[str, bool]] = []


class Moon(BaseModel):
    """What an agent has to answer."""

    phase: Literal["half", "full"]
    lit: bool


def look_at(phase: Literal["half", "full"], lit: bool) -> str:
    """Look at the moon."""
    assert phase in ("half", "full")
    assert isinstance(lit, bool)
    seen.append((phase, lit))
    return "It is there."


look = function_tool(look_at, name_override="look")
look_once = function_tool(look_at, name_override="look", is_enabled=lambda *_: not seen)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    once = ModelSettings(
        temperature=0,
        max_tokens=300,
        tool_choice="required",
        parallel_tool_calls=False,
        metadata={"client": "agents"},
        store=True,
        include_usage=True,
        verbosity="low",
        truncation=None,
    )
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        asking = kind(model=model, openai_client=client)
        agent = Agent(
            name="Sky", instructions="Be brief", model=asking, model_settings=once, tools=[look]
        )
        # It must call; after that the SDK leaves the choice to the model, whose words end the run.
        seen.clear()
        result = await Runner.run(agent, "Hello", max_turns=8)
        assert seen
        kinds = [type(item) for item in result.new_items]
        assert kinds[:2] == [ToolCallItem, ToolCallOutputItem]
        assert isinstance(result.final_output, str)
        assert result.context_wrapper.usage.output_tokens > 0

        # The same as a stream, which ends with the tool.
        ending = agent.clone(tool_use_behavior="stop_on_first_tool")
        seen.clear()
        streamed = Runner.run_streamed(ending, "Hello", max_turns=2)
        events = [event.type async for event in streamed.stream_events()]
        assert "run_item_stream_event" in events
        assert streamed.final_output == "It is there."
        assert len(seen) == 1

        # With an answer of a type beside the tool, which is there until it has been called: a small
        # model would call it for ever.
        seen.clear()
        free = ModelSettings(temperature=0, max_tokens=300, parallel_tool_calls=False)
        typed = agent.clone(output_type=Moon, model_settings=free, tools=[look_once])
        answer = await Runner.run(typed, "Hello", max_turns=8)
        assert isinstance(answer.final_output, Moon)
    await client.close()


asyncio.run(main())
