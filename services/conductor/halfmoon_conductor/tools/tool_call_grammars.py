"""Write grammars that make tool calls match their schemas, alone or beside free text.

Each is Lark text for `grammars.RequestedGrammar`. A call is written as `tool_call_syntax` defines
it, with the name first and one space after each colon.
"""

from collections.abc import Sequence
from typing import Any

from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat
from halfmoon_conductor.grammar.grammars import quote_literal, schema_rule
from halfmoon_conductor.tools.tool_call_syntax import CLOSE, OPEN

#: Function names, each with the schema of its arguments.
Functions = Sequence[tuple[str, dict[str, Any]]]


def calls_only_grammar(format: ToolCallFormat, functions: Functions, max_calls: int) -> str:
    """Return the grammar of an answer that is one to `max_calls` calls of these functions.

    Args:
        format: the model's format of calls.
        functions: the functions that may be called.
        max_calls: most calls; llama3_json has only one.

    Raises:
        ValueError: as `grammars.grammar_of_schema`.
    """
    if format == "llama3_json":
        return f"start: call\n{_call(format, functions)}"
    return f"start: {quote_literal(OPEN)} calls\n{_calls(functions, max_calls)}"


def free_text_grammar(format: ToolCallFormat, functions: Functions, max_calls: int) -> str:
    """Return the grammar of any text whose calls are of these functions.

    Args:
        format: the model's format of calls.
        functions: the functions that may be called.
        max_calls: most calls; llama3_json has only one.

    Raises:
        ValueError: as `grammars.grammar_of_schema`.
    """
    if format == "llama3_json":
        text_pattern = r'/(.|\n)*/ & ~/\s*\{\s*"name"(.|\n)*/'
        return f"start: WORDS | call\nWORDS: {text_pattern}\n{_call(format, functions)}"
    # A lazy lexeme ends with the first marker; as text alone, the answer can't continue after it.
    opened_call = rf"begun[lazy]: /(.|\n)*/ {quote_literal(OPEN)}"
    calls = _calls(functions, max_calls)
    return f"start: WORDS | begun calls\nWORDS: /(.|\\n)*/\n{opened_call}\n{calls}"


def schema_or_calls_grammar(functions: Functions, max_calls: int, schema: dict[str, Any]) -> str:
    """Return the grammar of a hermes answer that is JSON of a schema, or nothing but calls.

    Args:
        functions: the functions that may be called.
        max_calls: most calls.
        schema: the schema of an answer without calls.

    Raises:
        ValueError: as `grammars.grammar_of_schema`.
    """
    start = f"start: answer | {quote_literal(OPEN)} calls\nanswer: {schema_rule(schema)}"
    return f"{start}\n{_calls(functions, max_calls)}"


def _calls(functions: Functions, max_calls: int) -> str:
    """Return the rule `calls`: what follows the first marker, all further calls included."""
    again = quote_literal(f"\n{OPEN}")
    more = f" ({again} one){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    opened, closed = quote_literal("\n"), quote_literal(f"\n{CLOSE}")
    one = f"one: {opened} call {closed}"
    return f"calls: one{more}\n{one}\n{_call('hermes', functions)}"


def _call(format: ToolCallFormat, functions: Functions) -> str:
    """Return the rule `call`: one of the functions with its arguments."""
    key = "arguments" if format == "hermes" else "parameters"
    calls = " | ".join(
        " ".join(
            (
                quote_literal(f'{{"name": "{name}", "{key}": '),
                schema_rule(schema),
                quote_literal("}"),
            )
        )
        for name, schema in functions
    )
    return f"call: {calls}"
