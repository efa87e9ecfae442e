"""Requests with tools in the shapes of the three APIs that have them, and calls as models write."""

from typing import Any

from tests.conductor.fronts import CHAT, MESSAGES, RESPONSES

TOOL_PATHS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
DAY: dict[str, Any] = {
    "type": "object",
    "properties": {"day": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["day"],
    "additionalProperties": False,
}


def function(
    name: str, schema: dict[str, Any] | None = None, strict: bool | None = None
) -> dict[str, Any]:
    """Return a function without the fields that are None."""
    told = {"name": name, "parameters": schema, "strict": strict}
    return {name: value for name, value in told.items() if value is not None}


def a_call(name: str, arguments: str) -> str:
    """Return a call as Hermes' models write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def with_tools(path: str, *functions: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the fields of a request with these functions.

    `choice` is a mode, or the name of a function that must be called; `limit` is the most tokens
    of the answer; `stop` is a list of strings.
    """
    choice, limit = more.pop("choice", "auto"), more.pop("limit", 400)
    named = choice not in ("auto", "none", "required")
    if path == MESSAGES:
        tools = [
            {
                "name": each["name"],
                "input_schema": each.get("parameters", {"type": "object"}),
                "strict": each.get("strict"),
            }
            for each in functions
        ]
        kind = {"type": "tool", "name": choice} if named else {"type": choice}
        if choice == "required":
            kind = {"type": "any"}
        if "stop" in more:
            more["stop_sequences"] = more.pop("stop")
        return {"tools": tools, "tool_choice": kind, "max_tokens": limit, **more}
    if path == RESPONSES:
        tools = [{"type": "function", **each} for each in functions]
        picked: Any = {"type": "function", "name": choice} if named else choice
        return {"tools": tools, "tool_choice": picked, "max_output_tokens": limit, **more}
    tools = [{"type": "function", "function": each} for each in functions]
    picked = {"type": "function", "function": {"name": choice}} if named else choice
    return {"tools": tools, "tool_choice": picked, "max_tokens": limit, **more}
