"""What a chat with tools asks of its answer: which calls it may have, and a grammar for them."""

from typing import Any

from halfmoon_conductor.api.openai.openai_requests import ChatRequest
from halfmoon_conductor.api.structured_fields import schema_of
from halfmoon_conductor.api.tool_fields import FunctionDefinition, NamedTool, Tool
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
#: Of a strict function that says nothing of its parameters: it has none.
_NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def tool_call_rules_of(body: ChatRequest, parser: ToolCallFormat | None) -> ToolCallRules | None:
    """The calls that an answer to this may have; None: it can't have any.

    Args:
        body: what the client asks for.
        parser: how the model writes calls, if it is offered tools.
    """
    if parser is None:
        return None
    names = tuple(tool.function.name for tool in _callable(body))
    most = 1 if isinstance(body.tool_choice, NamedTool) else body.most_calls
    formed = schema_of(body.response_format) is not None
    place: ToolCallPlace = "free"
    if body.tool_choice not in (None, "auto"):
        place = "only"
    elif formed and parser == "llama3_json":
        return None  # a call is JSON too, and the answer's own form goes first
    elif formed:
        place = "first"
    elif any(tool.function.strict for tool in body.offered):
        place = "exact"
    return ToolCallRules(parser=parser, names=names, most=most, place=place)


def grammar_of_chat(body: ChatRequest, calling: ToolCallRules | None) -> RequestedGrammar | None:
    """What the answer must be, if anything, its calls included.

    Raises:
        InvalidRequest: what was asked for can't be had; the text says which field and why.
    """
    wanted = body.wanted()
    if calling is None or calling.place == "free":
        return wanted
    if wanted is not None and wanted.param != body.format_field:
        what = "tool_choice" if calling.place == "only" else "a strict function in tools"
        raise InvalidRequest(
            f"{wanted.param} and {what} both say what the answer must be; send one of them.",
            param="tool_choice" if calling.place == "only" else "tools",
        )
    body.check_ending("tools")
    try:
        return RequestedGrammar(_grammar(body, calling), "tools")
    except ValueError as error:
        raise InvalidRequest(f"tools can't be used: {error}", param="tools") from None


def _grammar(body: ChatRequest, calling: ToolCallRules) -> str:
    functions = [tool.function for tool in _callable(body)]
    if calling.place == "only":
        schemas = [(each.name, _schema(each)) for each in functions]
        return calls_only_grammar(calling.parser, schemas, calling.most)
    schemas = [(each.name, _schema(each) if each.strict else _ANY_OBJECT) for each in functions]
    form = schema_of(body.response_format)
    if form is not None:
        return schema_or_calls_grammar(schemas, calling.most, form)
    return free_text_grammar(calling.parser, schemas, calling.most)


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    """What the arguments must be: some object at least, since nothing else is a call.

    Raises:
        ValueError: the parameters are of another type.
    """
    schema = function.parameters or (_NO_PARAMETERS if function.strict else _ANY_OBJECT)
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f'parameters of {function.name} must have the type "object"')
    return {**schema, "type": "object"}


def _callable(body: ChatRequest) -> list[Tool]:
    """The tools that the answer may call."""
    choice = body.tool_choice
    if not isinstance(choice, NamedTool):
        return body.offered
    return [tool for tool in body.offered if tool.function.name == choice.function.name]
