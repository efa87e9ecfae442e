"""How models write that they call a tool, and their text taken apart into words and calls.

*hermes* (Qwen too): ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of
them, anywhere. *llama3_json*: the whole answer is ``{"name": …, "parameters": {…}}``.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from halfmoon_conductor.grammars import json_of, literal

Parser = Literal["hermes", "llama3_json"]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Call(msgspec.Struct, frozen=True):
    """One call; its arguments are a JSON object's text."""

    name: str
    arguments: str


def parser_of(template: str) -> Parser | None:
    """What a model whose chat template this is has learned to write; None: no tools."""
    if "tools" not in template:
        return None
    if _OPEN in template:
        return "hermes"
    return "llama3_json" if '"parameters"' in template else None


def grammar_of(parser: Parser, functions: Sequence[tuple[str, dict[str, Any]]], most: int) -> str:
    """An answer that is nothing but calls of these functions: one, or up to `most`.

    Args:
        parser: the model's way of writing them.
        functions: names and schemas of their arguments.
        most: calls at the most; of llama3_json only ever one.

    Raises:
        ValueError: as `grammars.json_of`.
    """
    key = "arguments" if parser == "hermes" else "parameters"
    calls = " | ".join(
        " ".join((literal(f'{{"name": "{name}", "{key}": '), json_of(schema), literal("}")))
        for name, schema in functions
    )
    if parser == "llama3_json":
        return f"start: call\ncall: {calls}"
    more = f"({literal(chr(10))} one){{0,{most - 1}}}" if most > 1 else ""
    opened, closed = literal(f"{_OPEN}\n"), literal(f"\n{_CLOSE}")
    return f"start: one {more}\none: {opened} call {closed}\ncall: {calls}"


class CallReader:
    """Text in, words and whole calls out; what is no call after all comes out as words.

    Args:
        parser: how calls are written.
        most: calls that are wanted; later ones are dropped.
    """

    def __init__(self, parser: Parser, most: int) -> None:
        self._parser = parser
        self._left = most
        self._held = ""
        #: Whether words have come out: then an answer is no call of llama3_json.
        self._spoke = False
        self.n_calls = 0

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """What is certain with this text."""
        self._held += text
        words, calls = "", list[Call]()
        if self._parser == "llama3_json":
            if self._spoke or self._held.lstrip()[:1] not in ("", "{"):
                self._spoke = True
                words, self._held = self._held, ""
            return words, calls
        while True:
            at = self._held.find(_OPEN)
            if at < 0:
                keep = _n_begun(self._held)
                cut = len(self._held) - keep
                words, self._held = words + self._held[:cut], self._held[cut:]
                return self._visible(words), calls
            end = self._held.find(_CLOSE, at)
            if end < 0:
                words, self._held = words + self._held[:at], self._held[at:]
                return self._visible(words), calls
            body = self._held[at + len(_OPEN) : end]
            call = _read(body)
            if call is None:
                words += self._held[: end + len(_CLOSE)]
            else:
                words += self._held[:at]
                calls += self._count(call)
            self._held = self._held[end + len(_CLOSE) :]

    def finish(self) -> tuple[str, list[Call]]:
        """The rest, at the end of the answer."""
        held, self._held = self._held, ""
        if self._parser == "llama3_json" and not self._spoke:
            call = _read(held)
            if call is not None:
                return "", self._count(call)
        return self._visible(held), []

    def _count(self, call: Call) -> list[Call]:
        if self._left <= self.n_calls:
            return []
        self.n_calls += 1
        return [call]

    def _visible(self, words: str) -> str:
        """Blanks around and between calls are no words."""
        if not self._spoke and not words.strip() and (self.n_calls or _OPEN in self._held):
            return ""
        self._spoke = self._spoke or bool(words.strip())
        return words if words.strip() or not self.n_calls else ""


def _n_begun(text: str) -> int:
    """Characters at the end that may begin a call."""
    return next((n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n])), 0)


def _read(body: str) -> Call | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))
