"""vLLM behind the contract of an engine: same tokens, same hooks, same bytes as torch's."""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import pytest

from halfmoon_engine.errors import EngineLost
from halfmoon_engine.interface import Engine, Run
from tests.vllm.conftest import ARCHITECTURES, GREEDY, prompt_of

Reference = Callable[[str, Sequence[int], int], list[int]]
EngineOf = Callable[..., Engine]
MakePool = Callable[..., Any]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunked_prefill_and_decode_equal_generate(
    arch: str, engine_of: EngineOf, make_pool: MakePool, reference: Reference
) -> None:
    pool = make_pool(engine_of(arch))
    for n, chunk in ((1, 512), (31, 7), (32, 512), (33, 512), (300, 512), (300, 37)):
        expected = reference(arch, prompt_of(n), 8)
        assert pool.generate(prompt_of(n), 8, chunk=chunk) == expected, f"{n} tokens by {chunk}"


@pytest.mark.parametrize(("first", "second"), [("vllm", "torch"), ("torch", "vllm")])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_pages_of_one_engine_continue_in_the_other(
    arch: str,
    first: str,
    second: str,
    engine_of: EngineOf,
    make_pool: MakePool,
    reference: Reference,
) -> None:
    prompt = prompt_of(200)
    theirs = make_pool(engine_of(arch, first), seed=1)
    pages = theirs.pages_for(200)
    theirs.engine.forward([Run(prompt, 0, pages, None)])
    ours = make_pool(engine_of(arch, second), seed=2)
    layout = ours.engine.layout
    assert layout == theirs.engine.layout
    landed = ours.pages_for(210)

    def land(layer: int) -> None:
        part = slice(layer * layout.layer_bytes, (layer + 1) * layout.layer_bytes)
        for page, source in zip(landed, pages, strict=False):
            ours.page_bytes(page)[part] = theirs.page_bytes(source)[part]

    (token,) = ours.engine.forward([Run(prompt[199:], 199, landed, GREEDY)], before_layer=land)
    more = ours.generate([*prompt, token], 7, pages=landed, cached=200)
    assert [token, *more] == reference(arch, prompt, 8)


def test_a_hook_that_fails_ends_the_pass_alone(engine_of: EngineOf, make_pool: MakePool) -> None:
    pool = make_pool(engine_of("llama"))
    expected = pool.generate(prompt_of(40), 4)

    def fail(layer: int) -> None:
        if layer == 1:
            raise ConnectionError("the blocks did not come")

    with pytest.raises(ConnectionError, match="did not come"):
        pool.engine.forward([Run([1, 2], 0, pool.pages_for(2), GREEDY)], before_layer=fail)
    assert pool.generate(prompt_of(40), 4) == expected


def test_two_ranks_share_the_heads_of_each_page(
    engine_of: EngineOf, make_pool: MakePool, reference: Reference
) -> None:
    pool = make_pool(engine_of("llama", tensor_parallel_size="2"))
    expected = reference("llama", prompt_of(200), 8)
    assert pool.generate(prompt_of(200), 8, chunk=70) == expected
    # And their pages are whole: one rank's worker goes on with them.
    single = make_pool(engine_of("llama"), seed=3)
    theirs, ours = pool.pages_for(200), single.pages_for(210)
    calls: list[int] = []
    pool.engine.forward([Run(prompt_of(200), 0, theirs, None)], after_layer=calls.append)
    assert calls == list(range(pool.engine.layout.n_layers))
    for page, source in zip(ours, theirs, strict=False):
        single.page_bytes(page)[:] = pool.page_bytes(source)
    assert single.generate(prompt_of(200), 8, pages=ours, cached=199) == expected


def test_a_killed_rank_is_known_at_once(engine_of: EngineOf, make_pool: MakePool) -> None:
    engine = engine_of("llama", tensor_parallel_size="2")  # this is its last use
    pool = make_pool(engine)
    pages = pool.pages_for(40)
    victims = [
        process
        for process in psutil.Process().children(recursive=True)
        if "Worker_TP" in process.name() or "Worker_TP" in " ".join(process.cmdline())
    ]
    assert len(victims) == 2
    engine.check_alive()

    def kill(layer: int) -> None:
        if layer == 1:
            os.kill(victims[-1].pid, signal.SIGKILL)

    with pytest.raises(EngineLost, match="rank"):
        engine.forward([Run(prompt_of(40), 0, pages, GREEDY)], before_layer=kill)
    with pytest.raises(EngineLost, match="rank"):
        engine.check_alive()
