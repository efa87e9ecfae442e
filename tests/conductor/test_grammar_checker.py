"""Grammars are checked where they can harm nothing, before anything is spent on them."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from halfmoon_conductor.errors import InvalidRequest, ServerOverloaded, ServiceUnavailable
from halfmoon_conductor.grammar import grammar_checker
from halfmoon_conductor.grammar.grammar_check_handler import CheckArgument
from halfmoon_conductor.grammar.grammar_checker import GrammarChecker
from halfmoon_conductor.grammar.grammars import RequestedGrammar, grammar_of_schema
from halfmoon_conductor.grammar.schema_depth import MAX_SCHEMA_DEPTH, check_depth
from halfmoon_sandbox import Child
from tests.conductor.fronts import CHAT, Front, error_of

SPINNING = {"type": "integer", "multipleOf": 2**31}


@pytest.fixture
def checker(bpe: Tokenizer) -> Iterator[GrammarChecker]:
    made = GrammarChecker(CheckArgument(bpe.to_str(), bpe.get_vocab_size(), (0,)))
    yield made
    made.close()


def wanted(grammar: str, *, own: bool = False) -> RequestedGrammar:
    return RequestedGrammar(grammar, "guided_grammar", own)


async def test_a_grammar_that_takes_too_long_is_refused_and_remembered(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_GRAMMAR_CPU_S", 0.2)
    spinning = wanted(grammar_of_schema(SPINNING))
    with pytest.raises(InvalidRequest, match=r"guided_grammar can't be used.*processor time"):
        await checker.check(spinning)
    checker.close()  # nothing can be checked any more: it is known
    with pytest.raises(InvalidRequest, match="processor time"):
        await checker.check(spinning)


async def test_the_loop_and_other_checks_go_on_meanwhile(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_GRAMMAR_CPU_S", 600.0)
    assert await checker.check(wanted('start: "a"')) == 'start: "a"'
    spinning = asyncio.create_task(checker.check(wanted(grammar_of_schema(SPINNING))))
    for i in range(20):
        assert await checker.check(wanted(f'start: "{i}"'))
        assert not spinning.done()
    spinning.cancel()
    await asyncio.gather(spinning, return_exceptions=True)


async def test_a_check_whose_client_has_gone_ends_its_process(checker: GrammarChecker) -> None:
    await checker.check(wanted('start: "a"'))
    (child, _) = checker._pool.idle[0]
    spinning = asyncio.create_task(checker.check(wanted(grammar_of_schema(SPINNING))))
    while not child.busy:
        await asyncio.sleep(0)
    spinning.cancel()
    await asyncio.gather(spinning, return_exceptions=True)
    assert not child.alive
    assert await checker.check(wanted('start: "b"'))


async def test_too_many_checks_at_once_are_refused_for_now(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "_MAX_WAITING", 3)
    checks = [checker.check(wanted(f'start: "{i}"')) for i in range(20)]
    outcomes = await asyncio.gather(*checks, return_exceptions=True)
    assert {type(each) for each in outcomes} == {str, ServerOverloaded}
    assert await checker.check(wanted('start: "later"'))


async def test_tenants_take_turns_and_none_has_all_places(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check(wanted('start: "a"'))
    monkeypatch.setattr(grammar_checker, "MAX_GRAMMAR_CPU_S", 600.0)  # the flood's never end
    grammars = [wanted(grammar_of_schema(SPINNING | {"title": str(i)})) for i in range(80)]
    slow = [asyncio.create_task(checker.check(each, "flood")) for each in grammars]
    await asyncio.sleep(0)
    refused = [each for each in slow if each.done()]
    assert 0 < len(refused) < 20
    assert {type(each.exception()) for each in refused} == {ServerOverloaded}
    for i in range(5):
        assert await checker.check(wanted(f'start: "{i}"'), "honest")
    assert [each for each in slow if each.done()] == refused
    for each in slow:
        each.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert not checker._own_places


async def test_what_is_remembered_has_a_limit_in_bytes(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "_MAX_REMEMBERED_BYTES", 100_000)
    grammars = [wanted(f'start: "{i}" // {"x" * 20_000}') for i in range(5)]
    for grammar in grammars:
        await checker.check(grammar)
    assert len(checker._remembered) == 2
    assert checker._n_remembered_bytes <= 100_000
    checker.close()
    assert await checker.check(grammars[-1])


async def test_a_process_or_a_template_that_dies_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(wanted('start: "a"'))
    (child, _) = checker._pool.idle[0]
    for i, pid in enumerate((child.pid, checker._pool.sandbox.pid)):
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert await checker.check(wanted(f'start: "{i}"'))


async def test_a_clients_own_grammar_is_translated_in_the_process(checker: GrammarChecker) -> None:
    lark = await checker.check(wanted('root ::= "a"', own=True))
    assert 'start: "a"' in lark
    with pytest.raises(InvalidRequest):
        await checker.check(wanted("root ::= (", own=True))


def kill_children(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Kill the next `n` children that get a grammar, as the kernel does when it lacks memory."""
    begin, left = Child.begin, [*range(n)]

    def begin_and_die(child: Child, request: bytes, *, cpu_s: float) -> None:
        if left:
            left.pop()
            os.kill(child.pid, signal.SIGKILL)
        begin(child, request, cpu_s=cpu_s)

    monkeypatch.setattr(Child, "begin", begin_and_die)


async def test_a_grammar_whose_children_are_killed_is_refused_for_now_and_checked_again_later(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_children(monkeypatch, 2)
    with pytest.raises(ServiceUnavailable, match=r"can't be checked now.*from outside") as refused:
        await checker.check(wanted('start: "a"'))
    assert refused.value.retry_after_s
    assert await checker.check(wanted('start: "a"')) == 'start: "a"'


async def test_a_child_without_processor_time_says_nothing_about_its_grammar(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check(wanted('start: "a"'))
    (child, _) = checker._pool.idle[0]
    with monkeypatch.context() as starved:
        starved.setattr("halfmoon_sandbox.child._WALL_EXTRA_S", 0.0)
        starved.setattr("halfmoon_sandbox.child._WALL_FACTOR", 0.0)
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(ServiceUnavailable, match="too little processor time"):
            await checker.check(wanted('start: "b"'))
    assert await checker.check(wanted('start: "b"'))


async def test_a_failed_check_is_a_503_with_a_time_to_retry(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_children(monkeypatch, 2)
    answer = await front.post(CHAT, guided_regex="[a-z]{3}")
    error_of(answer, 503)
    assert int(answer.headers["retry-after"]) >= 1
    await front.ask(CHAT, guided_regex="[a-z]{3}")


def chained(n: int, depth: int) -> dict[str, Any]:
    def link(i: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(depth):
            schema = {"items": schema}
        return schema

    return {"$defs": {**{f"d{i}": link(i) for i in range(n)}, f"d{n}": {}}, "$ref": "#/$defs/d0"}


def test_depth_is_counted_through_references_in_time_of_the_schemas_size() -> None:
    check_depth(chained(10, 10))
    with pytest.raises(ValueError, match=f"over {MAX_SCHEMA_DEPTH} levels"):
        check_depth(chained(110, 15))
    both = [{"$ref": f"#/$defs/d{i}"} for i in range(60)]
    links = {f"d{i}": {"anyOf": both[i + 1 :]} for i in range(60)}
    check_depth({"$defs": links, "$ref": "#/$defs/d0"}, limit=500)  # 2**59 paths


def test_a_recursive_schema_is_as_deep_as_it_is_written() -> None:
    tree = {"type": "object", "properties": {"children": {"items": {"$ref": "#"}}}}
    check_depth(tree, limit=4)
    with pytest.raises(ValueError):
        check_depth(tree, limit=3)


def test_references_that_lead_nowhere_are_left_to_the_library() -> None:
    for reference in ("#/$defs/none", "#/a/0/b", "#nowhere", "other.json#/x", 5):
        check_depth({"$ref": reference, "a": [1]})


def a_call_of(schema: dict[str, Any]) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    return {"tools": tools, "tool_choice": "required"}


FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SPINNING}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": FORM}, "response_format"),
        ({"guided_json": chained(110, 15)}, "guided_json"),
        ({"guided_regex": "a*" * 30_000}, "guided_regex"),
        ({"guided_regex": "a*" * 100_000}, "guided_regex"),
        ({"guided_json": json.dumps(SPINNING)}, "guided_json"),
        (a_call_of({"type": "object", "properties": {"a": SPINNING}}), "tools"),
    ],
)
async def test_a_hostile_wish_gets_a_400_that_names_its_field(
    front: Front, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_GRAMMAR_CPU_S", 0.2)
    assert (await front.refused(CHAT, fields))["param"] == param
