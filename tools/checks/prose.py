"""Find docstrings and docs that a newcomer would stumble over.

- A function's docstring begins with a verb ("Return the oldest lease"); a property's may be
  a noun. A module's or a class's says what it does or is, and is no riddle ("What is …").
- Programs are not persons: no "who", "nobody" or "whoever" for a process.
- A sentence has at most 25 words.
"""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tools.checks.sources import modules

MAX_WORDS = 25
#: First words that leave the reader without a verb or a noun.
RIDDLES = re.compile(
    r"(?:What|Who|Whom|Whose|Whoever|Which|Whether|How|Where|When|Why|Those|These|Its|Theirs|"
    r"That|Such|Nobody|Somebody|Everybody|Whatever|Anything|Everything|Something|Nothing)\b"
)
#: First words of a noun phrase, where a function's docstring wants a verb.
NOUNS = re.compile(
    r"(?:The|A|An|One|Two|All|Any|Each|Every|No|Some|Seconds|Bytes|Tokens|Blocks|Pages)\b"
)
PERSONS = re.compile(
    r"\b(?:who|whom|whoever|whomever|nobody|somebody|everybody|anybody|someone|anyone|everyone)\b",
    re.I,
)
#: Numbers and signs are no words.
_WORD = re.compile(r"\S*[^\W\d_]\S*")
_CODE = re.compile(r"```.*?```|`[^`]*`", re.S)
#: Indented lines and lines of a drawing or of a table: no prose.
_DRAWING = re.compile(r"^(?:    .*|.*[─│├└╭╰▶↓→◀═].*|\|.*)$", re.M)
_SENTENCE = re.compile(r"(?<=[.!?:;])[*)”]*\s+|\n\s*\n|\n\s*(?=[-*|#>]|\d+\.)")


def faults(root: Path) -> list[str]:
    """Return a line for each fault in our docstrings and docs."""
    found = []
    published = published_texts(root)
    for _, path in modules(root):
        where = path.relative_to(root)
        for line, kind, text in docstrings(path):
            if _one_line(text) in published:
                continue
            found += [f"{where}:{line}: {fault}" for fault in docstring_faults(kind, text)]
        for line, text in comments(path):
            found += [f"{where}:{line}: {fault}" for fault in persons(text)]
    for path in sorted([*root.glob("docs/**/*.md"), *root.glob("*.md")]):
        if path.name != "CHANGELOG.md":
            where = path.relative_to(root)
            text = flat_lists(path.read_text())
            found += [f"{where}: {fault}" for fault in [*text_faults(text), *cell_faults(text)]]
    return found


def published_texts(root: Path) -> set[str]:
    """Return the descriptions of the wire's JSON Schema, which changes with the wire alone."""
    texts = set()
    for path in root.glob("libs/protocol/schema/*.json"):
        found = re.findall(r'"description": ("(?:[^"\\]|\\.)*")', path.read_text())
        texts |= {_one_line(json.loads(each)) for each in found}
    return texts


def docstrings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind ("module", "class", "function" or "property") and text of docstrings."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Module():
                kind, line = "module", 1
            case ast.ClassDef():
                kind, line = "class", node.lineno
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                kind, line = "property" if _is_property(node) else "function", node.lineno
            case _:
                continue
        if (text := ast.get_docstring(node)) is not None:
            yield line, kind, text


def docstring_faults(kind: str, text: str) -> Iterator[str]:
    """Yield what is wrong with one docstring."""
    first = text.split("\n", 1)[0]
    if RIDDLES.match(first) or (kind == "function" and NOUNS.match(first)):
        yield f"begin with a verb: {first!r}"
    prose = re.split(r"\n\s*(?:Args|Returns|Raises|Yields|Attributes):\n", text)[0]
    yield from text_faults(prose)


def flat_lists(text: str) -> str:
    """Return Markdown without the indentation of list items; other indented lines are code."""
    lines, in_list = [], False
    for line in text.splitlines():
        if re.match(r"\s*(?:[-*]|\d+\.) ", line):
            in_list = True
        elif line and not line.startswith(" "):
            in_list = False
        lines.append(line.strip() if in_list else line)
    return "\n".join(lines)


def text_faults(text: str) -> Iterator[str]:
    """Yield persons and long sentences of a text."""
    plain = _DRAWING.sub("\n", _CODE.sub("code", text))
    for sentence in _SENTENCE.split(plain):
        yield from persons(sentence)
        if len(words := _WORD.findall(sentence)) > MAX_WORDS:
            yield f"{len(words)} words in a sentence, at most {MAX_WORDS}: {_short(sentence)!r}"


def cell_faults(text: str) -> Iterator[str]:
    """Yield the cells of Markdown tables that say more than one thing, and persons in them."""
    for row in re.findall(r"^\|.*\|$", text, re.M):
        for cell in re.split(r"(?<!\\)\|", _CODE.sub("code", row)):
            yield from persons(cell)
            if len(words := _WORD.findall(cell)) > MAX_WORDS:
                yield f"{len(words)} words in a cell, at most {MAX_WORDS}: {_short(cell)!r}"


def persons(text: str) -> Iterator[str]:
    """Yield the words in a text that make a person of a program."""
    if found := PERSONS.search(text):
        yield f"a program is no person ({found[0]!r}): {_short(text)!r}"


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(
        (isinstance(one, ast.Name) and one.id in ("property", "cached_property"))
        or (isinstance(one, ast.Attribute) and one.attr in ("setter", "cached_property"))
        for one in node.decorator_list
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(sentence: str) -> str:
    return _one_line(sentence)[:80]
