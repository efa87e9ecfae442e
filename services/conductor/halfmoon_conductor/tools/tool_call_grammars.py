"""Grammars that keep calls of tools to their schemas, alone or beside free text.

Each is Lark text for `grammars.Wanted`. A call is written just as `call_syntax` has it: the name
first, one blank after each colon.
"""

from collections.abc import Sequence
from typing import Any

from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat
from halfmoon_conductor.grammar.grammars import quote_literal, schema_rule
from halfmoon_conductor.tools.tool_call_syntax import CLOSE, OPEN

#: Names, and schemas of the arguments.
Functions = Sequence[tuple[str, dict[str, Any]]]


def calls_only_grammar(parser: ToolCallFormat, functions: Functions, most: int) -> str:
    """An answer that is nothing but calls of these functions: one, or up to `most`.

    Args:
        parser: the model's way of writing them.
        functions: what may be called.
        most: calls at the most; of llama3_json only ever one.

    Raises:
        ValueError: as `grammars.json_of`.
    """
    if parser == "llama3_json":
        return f"start: call\n{_call(parser, functions)}"
    return f"start: {quote_literal(OPEN)} calls\n{_calls(functions, most)}"


def free_text_grammar(parser: ToolCallFormat, functions: Functions, most: int) -> str:
    """An answer of any text, in which what begins a call is one of these functions'.

    Args:
        parser: the model's way of writing them.
        functions: what may be called.
        most: calls at the most; of llama3_json only ever one.

    Raises:
        ValueError: as `grammars.json_of`.
    """
    if parser == "llama3_json":
        words = r'/(.|\n)*/ & ~/\s*\{\s*"name"(.|\n)*/'
        return f"start: WORDS | call\nWORDS: {words}\n{_call(parser, functions)}"
    # A lazy lexeme ends with the first marker; as words alone the text can't go on behind it.
    begun = rf"begun[lazy]: /(.|\n)*/ {quote_literal(OPEN)}"
    return f"start: WORDS | begun calls\nWORDS: /(.|\\n)*/\n{begun}\n{_calls(functions, most)}"


def schema_or_calls_grammar(functions: Functions, most: int, schema: dict[str, Any]) -> str:
    """An answer of hermes that is either JSON of a schema or nothing but calls.

    Args:
        functions: what may be called.
        most: calls at the most.
        schema: of the answer.

    Raises:
        ValueError: as `grammars.json_of`.
    """
    start = f"start: answer | {quote_literal(OPEN)} calls\nanswer: {schema_rule(schema)}"
    return f"{start}\n{_calls(functions, most)}"


def _calls(functions: Functions, most: int) -> str:
    """The rule `calls`: what follows the first marker, all other calls included."""
    again = quote_literal(f"\n{OPEN}")
    more = f" ({again} one){{0,{most - 1}}}" if most > 1 else ""
    opened, closed = quote_literal("\n"), quote_literal(f"\n{CLOSE}")
    one = f"one: {opened} call {closed}"
    return f"calls: one{more}\n{one}\n{_call('hermes', functions)}"


def _call(parser: ToolCallFormat, functions: Functions) -> str:
    """The rule `call`: one of the functions with its arguments."""
    key = "arguments" if parser == "hermes" else "parameters"
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
