"""What an answer must be, from the fields that clients know to one grammar for the workers.

The grammar is Lark text (see `halfmoon_protocol.sampling.Sampling.grammar`). It is checked here
with the library that the workers use, so that what does not compile is refused before anything
is spent. The library recurses as deep as rules lead to rules, on a thread's stack: the limits
on references and on a client's own grammar keep it far from the end of one: by a factor of four, as
far as chains of rules and of references were tried.
"""

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from halfmoon_conductor.errors import InvalidRequest
from halfmoon_protocol.sampling import MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_SYMBOLS

#: Of a grammar that a client wrote itself.
MAX_OWN_GRAMMAR_CHARACTERS = 3_000
MAX_SCHEMA_REFERENCES = 128
#: Between the parts of JSON a model may indent, and not go on with blanks for ever.
_BLANKS = "[ \\n\\t]{0,16}"
_LIMITS = llguidance.LLParserLimits(verbose_errors=False, max_grammar_size=MAX_GRAMMAR_SYMBOLS)
_SHOWN_CHARACTERS = 300


class Wanted(msgspec.Struct, frozen=True):
    """A grammar, and the field of the request that asks for it."""

    grammar: str
    param: str


def any_object() -> str:
    """Some JSON object."""
    return of_schema({"type": "object"})


def of_schema(schema: dict[str, Any]) -> str:
    """JSON of a schema."""
    return f"start: {json_of(schema)}"


def read_schema(text: str) -> dict[str, Any]:
    """A schema from its text.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None
    if not isinstance(schema, dict):
        raise ValueError("the schema is not a JSON object")
    return schema


def json_of(schema: dict[str, Any]) -> str:
    """The same as a part of a rule.

    Raises:
        ValueError: too many references, too deep, or a number that JSON has not.
    """
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise ValueError("x-guidance of the schema is not an object")
    options = {"whitespace_pattern": _BLANKS, **options}
    try:
        # Escaped to ASCII, so that half of a surrogate pair is the library's to refuse.
        text = json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None
    if (n_references := text.count('"$ref"')) > MAX_SCHEMA_REFERENCES:
        raise ValueError(
            f"the schema has {n_references} references, over the {MAX_SCHEMA_REFERENCES} that it "
            "may have; write some of them out"
        )
    return f"%json {text}"


def of_regex(pattern: str) -> str:
    """A whole text that matches, anchored or not."""
    return f"start: /{llguidance.regex_to_lark(pattern, '')}/"


def of_choices(choices: Sequence[str]) -> str:
    """One of these texts."""
    return "start: " + " | ".join(literal(choice) for choice in choices)


def literal(text: str) -> str:
    """A text as it stands, as a part of a rule."""
    return json.dumps(text)


def of_own(text: str) -> str:
    """A client's grammar: Lark, or GBNF (rules with ``::=``), which is translated.

    Raises:
        ValueError: too long, or not what it seems to be.
    """
    if len(text) > MAX_OWN_GRAMMAR_CHARACTERS:
        raise ValueError(
            f"the grammar has {len(text)} characters, over the {MAX_OWN_GRAMMAR_CHARACTERS} "
            "that one may have"
        )
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the translator raises what it likes
        raise ValueError(str(error)) from None


def check(wanted: Wanted) -> None:
    """Compile it, without a tokenizer. Takes milliseconds, at worst some hundreds: for a thread.

    Raises:
        InvalidRequest: it does not compile, or is too large; the text says where and why.
    """
    if len(wanted.grammar) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"{wanted.param} makes a grammar of {len(wanted.grammar)} characters, over the "
            f"{MAX_GRAMMAR_CHARACTERS} that one may have.",
            param=wanted.param,
        )
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        wanted.grammar, limits=_LIMITS
    )
    if failed:
        why = " ".join(messages).split("\n   1 |")[0].strip()[:_SHOWN_CHARACTERS]
        raise InvalidRequest(f"{wanted.param} does not compile: {why}", param=wanted.param)
