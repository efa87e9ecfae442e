"""Turn the fields for structured output into one grammar for the workers.

The grammar is Lark text (see `halfmoon_protocol.sampling.Sampling.grammar`). It is assembled here,
within limits of size and depth; `grammar_checker` compiles it before any worker is involved.
"""

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import msgspec

from halfmoon_conductor.grammar.schema_depth import check_depth
from halfmoon_protocol.sampling import MAX_GRAMMAR_CHARACTERS

#: Most characters of a grammar that a client wrote itself.
MAX_CLIENT_GRAMMAR_CHARACTERS = 3_000
MAX_SCHEMA_REFERENCES = 128
#: Whitespace between the parts of JSON: a model may indent, but not write blanks for ever.
_BLANKS = "[ \\n\\t]{0,16}"


class RequestedGrammar(msgspec.Struct, frozen=True):
    """A grammar, and the field of the request that asks for it."""

    grammar: str
    param: str
    #: Whether the client wrote it, in Lark or in GBNF, which is translated to Lark.
    from_client: bool = False


def grammar_of_any_object() -> str:
    """Return the grammar of any JSON object."""
    return grammar_of_schema({"type": "object"})


def grammar_of_schema(schema: dict[str, Any]) -> str:
    """Return the grammar of JSON that matches a schema."""
    return f"start: {schema_rule(schema)}"


def read_schema(text: str) -> dict[str, Any]:
    """Parse a schema.

    Raises:
        ValueError: it is not a JSON object, or too long, whitespace included.
    """
    if len(text) > (most := 4 * MAX_GRAMMAR_CHARACTERS):
        raise ValueError(
            f"the schema has {len(text)} characters, over the {most} that one may have"
        )
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None
    if not isinstance(schema, dict):
        raise ValueError("the schema is not a JSON object")
    return schema


def schema_rule(schema: dict[str, Any]) -> str:
    """Return a schema as part of a grammar rule.

    Raises:
        ValueError: it has too many references, is too deep, or has a number that JSON can't write.
    """
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise ValueError("x-guidance of the schema is not an object")
    options = {"whitespace_pattern": _BLANKS, **options}
    try:
        # Escaped to ASCII, so that the library refuses half of a surrogate pair.
        text = json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None
    if (n_references := text.count('"$ref"')) > MAX_SCHEMA_REFERENCES:
        raise ValueError(
            f"the schema has {n_references} references, over the {MAX_SCHEMA_REFERENCES} that it "
            "may have; write some of them out"
        )
    check_depth(schema)
    return f"%json {text}"


def grammar_of_regex(pattern: str) -> str:
    """Return the grammar of a whole text that matches a pattern, anchored or not.

    Raises:
        ValueError: it is longer than any grammar may be.
    """
    if len(pattern) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(
            f"the pattern has {len(pattern)} characters, over the {MAX_GRAMMAR_CHARACTERS} "
            "that one may have"
        )
    return f"start: /{llguidance.regex_to_lark(pattern, '')}/"


def grammar_of_choices(choices: Sequence[str]) -> str:
    """Return the grammar of one of these texts."""
    return "start: " + " | ".join(quote_literal(choice) for choice in choices)


def quote_literal(text: str) -> str:
    """Return a literal text as part of a grammar rule."""
    return json.dumps(text)


def check_client_grammar(text: str) -> str:
    """Return a client's grammar, Lark or GBNF, unchanged.

    Raises:
        ValueError: it is too long.
    """
    if len(text) > MAX_CLIENT_GRAMMAR_CHARACTERS:
        raise ValueError(
            f"the grammar has {len(text)} characters, over the {MAX_CLIENT_GRAMMAR_CHARACTERS} "
            "that one may have"
        )
    return text
