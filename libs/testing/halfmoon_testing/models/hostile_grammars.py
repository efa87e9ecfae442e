"""Generate random grammars that a hostile client might send, to fuzz grammar compilers.

Most are small and malicious, some are large, and a few are ordinary. Equal seeds give equal
grammars.
"""

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

_LARGE = (9, 10**3, 10**5, 10**6, 2**31 - 1, 2**31, 2**53, 10**18, 2**63 - 1, 2**64)
_WORDS = ("a", "moon", "half moon", "é", "半月", "🌗", '"', "\\", "\n", "", "x" * 200)
_FORMATS = ("date-time", "time", "date", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "x")
#: Share of grammars that vary the worst known ones.
_MEAN = 0.03
_ATOMS = ("a", ".", "[a-z]", "[^a]", r"\d", r"\w", r"\s", "é", "(?i:x)", r"\p{L}")
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object", "foo")


@dataclass(frozen=True)
class HostileGrammar:
    """One generated grammar."""

    kind: Literal["schema", "regex", "grammar"]
    #: A schema as JSON, a regular expression, or a grammar in Lark or GBNF.
    text: str

    @property
    def to_lark(self) -> str:
        """The unchecked grammar, in the form that workers get."""
        match self.kind:
            case "schema":
                return f"start: %json {self.text}"
            case "regex":
                escaped = self.text.replace("/", "\\/").replace("\n", "\\n")
                return f"start: /{escaped}/"
            case "grammar":
                return self.text


def random_grammar(dice: random.Random) -> HostileGrammar:
    """Return the next random grammar."""
    if dice.random() < _MEAN:
        return _mean(dice)
    kind = dice.choice(("schema", "schema", "regex", "grammar"))
    if kind == "schema":
        return HostileGrammar("schema", json.dumps(_schema_with_definitions(dice)))
    if kind == "regex":
        return HostileGrammar("regex", _regex(dice, dice.randint(1, 5))[:60_000])
    return HostileGrammar("grammar", _grammar(dice)[:3_000])


def _mean(dice: random.Random) -> HostileGrammar:
    """Vary a grammar that is known to take minutes or gigabytes, or to kill the process."""
    match dice.randint(0, 4):
        case 0:
            factor = dice.choice((2**31, 2**40, 10**9 + 7, 10**12)) + dice.randrange(1000)
            return HostileGrammar("schema", json.dumps({"type": "integer", "multipleOf": factor}))
        case 1:
            n, depth = dice.randint(60, 120), dice.randint(5, 25)
            return HostileGrammar("schema", json.dumps(_chained(n, depth)))
        case 2:
            return HostileGrammar("regex", (dice.choice("abc") + "*") * dice.randint(5_000, 30_000))
        case 3:
            counts = "".join(f"{{{dice.randint(200, 2000)}}})" for _ in range(3))
            return HostileGrammar("regex", "(((ab?" + counts)
        case _:
            parts = [{"pattern": f"(.*{c}.*){{{dice.randint(3, 30)}}}"} for c in "abcdef"]
            return HostileGrammar("schema", json.dumps({"type": "string", "allOf": parts}))


def _chained(n: int, depth: int) -> dict[str, Any]:
    def link(i: int) -> dict[str, Any]:
        below: dict[str, Any] = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(depth):
            below = {"items": below}
        return below

    return {"$defs": {**{f"d{i}": link(i) for i in range(n)}, f"d{n}": {}}, "$ref": "#/$defs/d0"}


# -- schemas -----------------------------------------------------------------------------------


def _schema_with_definitions(dice: random.Random) -> dict[str, Any]:
    n = dice.choice((0, 0, 1, 3, 20, 120))
    schema = _schema(dice, dice.randint(1, 5), n)
    if n:
        schema["$defs"] = {f"d{i}": _definition(dice, i, n) for i in range(n)}
        if dice.random() < 0.5:
            schema["$ref"] = "#/$defs/d0"
    return schema


def _definition(dice: random.Random, i: int, n: int) -> dict[str, Any]:
    if dice.random() < 0.3:
        return _schema(dice, 2, n)
    link: dict[str, Any] = {"$ref": f"#/$defs/d{min(i + 1, n - 1)}"}
    for _ in range(dice.choice((0, 1, 3, 15))):
        link = {"items": link} if dice.random() < 0.7 else {"properties": {"p": link}}
    return link


def _schema(dice: random.Random, depth: int, n_definitions: int) -> dict[str, Any]:
    def below() -> dict[str, Any]:
        return _schema(dice, depth - 1, n_definitions) if depth > 0 else {}

    def several() -> list[dict[str, Any]]:
        return [below() for _ in range(dice.choice((1, 2, 3, 3, 12)))]

    schema: dict[str, Any] = {}
    if dice.random() < 0.8:
        schema["type"] = dice.choice(_TYPES)
    for _ in range(dice.randint(0, 3)):
        match dice.randint(0, 19):
            case 0:
                schema["multipleOf"] = dice.choice((*_LARGE, 0.1, 1e-9, 7, 0, -3))
                schema.setdefault("type", "integer")
            case 1:
                schema["minimum"], schema["maximum"] = -_number(dice), _number(dice)
            case 2:
                schema["exclusiveMinimum"] = _number(dice)
            case 3:
                schema["minLength"], schema["maxLength"] = _number(dice), _number(dice)
            case 4:
                schema["pattern"] = _regex(dice, 3)[:2000]
            case 5:
                schema["minItems"], schema["items"] = _number(dice), below()
            case 6:
                schema["maxItems"], schema["items"] = _number(dice), below()
            case 7:
                schema["prefixItems"] = several()
            case 8:
                names = [dice.choice(_WORDS) + str(i) for i in range(dice.choice((1, 3, 60)))]
                schema["properties"] = {name: below() for name in names[:12]}
                schema["required"] = names
            case 9:
                schema["patternProperties"] = {_regex(dice, 2)[:200]: below()}
            case 10:
                schema["propertyNames"] = below()
            case 11:
                schema["additionalProperties"] = dice.choice((False, True, below()))
            case 12:
                schema["anyOf"] = several()
            case 13:
                schema["allOf"] = several()
            case 14:
                schema["oneOf"] = several()
            case 15:
                schema["enum"] = [
                    dice.choice(_WORDS) + str(i) for i in range(dice.choice((1, 9, 3000)))
                ]
            case 16:
                schema["const"] = dice.choice((*_WORDS, None, 1.5, [], {"a": 1}))
            case 17:
                schema["format"] = dice.choice(_FORMATS)
            case 18 if n_definitions:
                schema["$ref"] = f"#/$defs/d{dice.randrange(n_definitions)}"
            case _:
                schema["not" if dice.random() < 0.3 else "if"] = below()
    return schema


def _number(dice: random.Random) -> int:
    return dice.choice((0, 1, 5, 30, *_LARGE))


# -- regular expressions -----------------------------------------------------------------------


def _regex(dice: random.Random, depth: int) -> str:
    if depth <= 0:
        return dice.choice(
            ("a", ".", "[a-z]", "[^a]", r"\d", r"\w", r"\s", "é", "(?i:x)", r"\p{L}")
        )
    inner = _regex(dice, depth - 1)[:4000]
    match dice.randint(0, 9):
        case 0:
            return inner + dice.choice(("*", "+", "?", "*?"))
        case 1:
            return f"({inner}){{{dice.choice((2, 30, 1000, 100_000))}}}"
        case 2:
            low = dice.choice((0, 1, 50))
            return f"({inner}){{{low},{low + dice.choice((1, 100, 60_000))}}}"
        case 3:
            return f"({inner})" + dice.choice(("*", "+")) * dice.choice((1, 2, 50))
        case 4:
            return "|".join(_regex(dice, depth - 1) for _ in range(dice.choice((2, 8, 300))))
        case 5:
            return inner * dice.choice((2, 20, 5000))
        case 6:
            return "(" * 40 + inner + ")" * 40
        case 7:
            return f"(.*{inner}.*)" + f"{{{dice.choice((3, 30, 300))}}}"
        case 8:
            return dice.choice(
                (f"(?={inner})", f"^{inner}$", f"({inner}", f"\\b{inner}", f"[{inner}")
            )
        case _:
            return inner + _regex(dice, depth - 1)


# -- grammars ----------------------------------------------------------------------------------


def _grammar(dice: random.Random) -> str:
    n = dice.choice((1, 3, 10, 60))
    gbnf = dice.random() < 0.3
    names = [f"r{i}" if gbnf else f"rule{i}" for i in range(n)]
    becomes = "::=" if gbnf else ":"

    def symbol() -> str:
        roll = dice.random()
        if roll < 0.45:
            return dice.choice(names)
        if roll < 0.8:
            return json.dumps(dice.choice(_WORDS), ensure_ascii=False)
        if gbnf:
            return dice.choice(("[a-z]", "[^x]", "[0-9]+"))
        return f"/{_regex(dice, 2)[:200].replace('/', '')}/"

    def alternative() -> str:
        parts = [symbol() for _ in range(dice.choice((1, 2, 3, 8)))]
        return " ".join(
            f"({part}){dice.choice('*+?')}" if dice.random() < 0.3 else part for part in parts
        )

    rules = [
        f"{name} {becomes} " + " | ".join(alternative() for _ in range(dice.choice((1, 2, 4))))
        for name in names
    ]
    top = f"{'root' if gbnf else 'start'} {becomes} {names[0]}"
    if not gbnf and dice.random() < 0.2:
        rules.append(f"{names[0]}x: %json {json.dumps(_schema(dice, 2, 0))}")
    return "\n".join([top, *rules])
