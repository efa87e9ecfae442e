"""Derive from a chat with tools which calls its answer may have, and their grammar."""

from typing import Any

from halfmoon_conductor.api.openai.openai_requests import ChatRequest
from halfmoon_conductor.api.structured_fields import schema_of
from halfmoon_conductor.api.tool_fields import (
    FunctionDefinition,
    NamedTool,
    Tool,
    chosen_names,
)
from halfmoon_conductor.engine_io.tool_call_rules import (
    ToolCallFormat,
    ToolCallPlace,
    ToolCallRules,
)
from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.grammar.grammars import RequestedGrammar
from halfmoon_conductor.tools.tool_call_grammars import (
    calls_only_grammar,
    free_text_grammar,
    schema_or_calls_grammar,
)

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
#: Parameters of a strict function that declares none.
_NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def tool_call_rules_of(body: ChatRequest, format: ToolCallFormat | None) -> ToolCallRules | None:
    """Return the calls that the answer may have; None: it can't have any.

    Args:
        body: the client's request.
        format: how the model writes calls, if tools are offered.
    """
    if format is None:
        return None
    names = tuple(tool.function.name for tool in _callable_tools(body))
    max_calls = 1 if isinstance(body.tool_choice, NamedTool) else body.max_calls
    has_schema = schema_of(body.response_format) is not None
    place: ToolCallPlace = "free"
    if body.must_call:
        place = "only"
    elif has_schema and format == "llama3_json":
        return None  # a call is JSON too, and the requested schema takes precedence
    elif has_schema:
        place = "first"
    elif len(names) < len(body.offered_tools) or any(
        tool.function.strict for tool in body.offered_tools
    ):
        place = "exact"
    return ToolCallRules(format=format, names=names, max_calls=max_calls, place=place)


def grammar_of_chat(body: ChatRequest, rules: ToolCallRules | None) -> RequestedGrammar | None:
    """Return the grammar of the answer, its calls included; None: any text will do.

    Raises:
        InvalidRequest: a field is not supported; the text names it and the reason.
    """
    requested = body.requested_grammar()
    if rules is None or rules.place == "free":
        return requested
    if requested is not None and requested.param != body.format_field:
        conflicting = "tool_choice" if rules.place == "only" else "a strict function in tools"
        raise InvalidRequest(
            f"{requested.param} and {conflicting} both say what the answer must be; send one of "
            "them.",
            param="tool_choice" if rules.place == "only" else "tools",
        )
    body.check_ending("tools")
    try:
        return RequestedGrammar(_grammar(body, rules), "tools")
    except ValueError as error:
        raise InvalidRequest(f"tools can't be used: {error}", param="tools") from None


def _grammar(body: ChatRequest, rules: ToolCallRules) -> str:
    functions = [tool.function for tool in _callable_tools(body)]
    if rules.place == "only":
        schemas = [(each.name, _argument_schema(each)) for each in functions]
        return calls_only_grammar(rules.format, schemas, rules.max_calls)
    schemas = [
        (each.name, _argument_schema(each) if each.strict else _ANY_OBJECT) for each in functions
    ]
    schema = schema_of(body.response_format)
    if schema is not None:
        return schema_or_calls_grammar(schemas, rules.max_calls, schema)
    return free_text_grammar(rules.format, schemas, rules.max_calls)


def _argument_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Return the schema of a function's arguments, which must be an object.

    Raises:
        ValueError: the declared parameters are of another type.
    """
    schema = function.parameters or (_NO_PARAMETERS if function.strict else _ANY_OBJECT)
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f'parameters of {function.name} must have the type "object"')
    return {**schema, "type": "object"}


def _callable_tools(body: ChatRequest) -> list[Tool]:
    """Return the tools that the answer may call."""
    names = chosen_names(body.tool_choice)
    if names is None:
        return body.offered_tools
    return [tool for tool in body.offered_tools if tool.function.name in names]
