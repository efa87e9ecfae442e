"""However a text is cut into pieces, and wherever it ends, the same words and calls come out."""

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat, ToolCallPlace
from halfmoon_conductor.tools.tool_call_bodies import ParsedCall
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser

NAMES = ("moon_phase", "moon_rise", "tide")
#: Texts with what could be taken for markers, ends of strings and blanks.
_PIECES = ["a", " ", "\n", '"', "\\", "<", "<tool", "<tool_call>", "</tool_call>", "{", "半"]
AWKWARD = st.lists(st.sampled_from(_PIECES), max_size=5).map("".join)
ARGUMENTS = st.dictionaries(
    AWKWARD, AWKWARD | st.integers() | st.lists(AWKWARD, max_size=2), max_size=3
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, Any]:
    return draw(st.sampled_from(NAMES)), draw(ARGUMENTS)


def written(parser: ToolCallFormat, made: list[tuple[str, Any]]) -> str:
    """Calls as a grammar has them."""
    if parser == "llama3_json":
        name, arguments = made[0]
        return f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}'
    bodies = [
        f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}' for name, arguments in made
    ]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def read(
    parser: ToolCallFormat, place: ToolCallPlace, text: str, cuts: list[int], *, cut: bool
) -> tuple[str, list[ParsedCall], bool]:
    """Words without blanks, calls, and whether the text was cut off in one."""
    reader = ToolCallParser(parser, 99, NAMES, place)
    at = [0, *sorted(min(each, len(text)) for each in cuts), len(text)]
    parts = [reader.feed(text[i:j]) for i, j in itertools.pairwise(at)]
    parts.append(reader.finish(cut=cut))
    words = "".join("".join(words for words, _ in parts).split())
    return words, [call for _, made in parts for call in made], reader.cut_in_call


PARSERS = st.sampled_from(["hermes", "llama3_json"])
CUTS = st.lists(st.integers(0, 300), max_size=8)


@given(
    parser=PARSERS,
    place=st.sampled_from(["free", "exact", "first", "only"]),
    text=AWKWARD,
    made=st.lists(calls(), min_size=1, max_size=2),
    end=st.integers(0, 400),
    cuts=CUTS,
    cut=st.booleans(),
)
def test_pieces_change_nothing(
    parser: ToolCallFormat, place: ToolCallPlace, text: str, made: list[tuple[str, Any]], end: int,
    cuts: list[int], cut: bool,
) -> None:  # fmt: skip
    whole = (text + written(parser, made))[:end]
    assert read(parser, place, whole, cuts, cut=cut) == read(parser, place, whole, [], cut=cut)


@given(
    parser=PARSERS,
    made=st.lists(calls(), min_size=1, max_size=3),
    end=st.integers(0, 600),
    cuts=CUTS,
)
def test_where_nothing_but_calls_may_come_there_are_no_words(
    parser: ToolCallFormat, made: list[tuple[str, Any]], end: int, cuts: list[int]
) -> None:
    whole = written(parser, made)
    words, found, is_cut = read(parser, "only", whole[:end], cuts, cut=True)
    assert words == ""
    for call, (name, arguments) in zip(found, made, strict=False):
        assert call.name == name
        if call.whole:
            assert json.loads(call.arguments) == arguments
        else:
            assert call is found[-1]
            assert json.dumps(arguments).startswith(call.arguments)
    if end >= len(whole):
        assert len(found) == (1 if parser == "llama3_json" else len(made))
        assert not is_cut


@given(before=AWKWARD, made=st.lists(calls(), min_size=1, max_size=3), cuts=CUTS)
def test_words_before_calls_stay_as_they_are(
    before: str, made: list[tuple[str, Any]], cuts: list[int]
) -> None:
    before = before.replace("<tool_call>", "")
    words, found, _ = read("hermes", "exact", before + written("hermes", made), cuts, cut=False)
    assert words == "".join(before.split())
    assert [(call.name, json.loads(call.arguments)) for call in found] == made
