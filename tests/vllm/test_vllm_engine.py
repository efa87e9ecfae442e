"""vLLM behind the contract of an engine: same tokens, same hooks, same bytes as torch's."""

import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from halfmoon_engine.errors import BadEngineOption, EngineLost
from halfmoon_engine.interface import Engine, Run
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import Sampling
from tests.vllm.conftest import ARCHITECTURES, BLOCK_SIZE, GREEDY, prompt_of

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


def test_a_ragged_batch_in_all_phases_equals_each_alone(
    engine_of: EngineOf, make_pool: MakePool, reference: Reference
) -> None:
    engine = engine_of("llama")
    pool = make_pool(engine)
    lengths, n_new = (1, 31, 64, 100, 400), 8
    dice = random.Random(7)
    tokens = {n: prompt_of(n) for n in lengths}
    pages = {n: pool.pages_for(n + n_new) for n in lengths}
    done = dict.fromkeys(lengths, 0)
    while unfinished := [n for n in lengths if len(tokens[n]) < n + n_new]:
        chosen = dice.sample(unfinished, dice.randint(1, len(unfinished)))
        runs: list[Run] = []
        for n in chosen:
            part = tokens[n][done[n] : done[n] + dice.choice([5, 40, 600])]
            last = done[n] + len(part) == len(tokens[n])
            runs.append(
                Run(part, done[n], pages[n], GREEDY if last else None, continues=done[n] > 0)
            )
            done[n] += len(part)
        for n, token in zip(chosen, engine.forward(runs), strict=True):
            if isinstance(token, int):
                tokens[n].append(token)
    for n in lengths:
        assert tokens[n][n:] == reference("llama", prompt_of(n), n_new), f"{n} tokens"


def test_vllm_widens_the_window_of_cohere2_by_one_token(
    narrow_cohere2: tuple[Path, list[int]], engine_of: EngineOf, make_pool: MakePool
) -> None:
    folder, with_one_more = narrow_cohere2
    engine = open_engine(
        str(folder),
        block_size=BLOCK_SIZE,
        dtype="float32",
        device="cpu",
        threads=1,
        engine="vllm",
        engine_options={"enforce_eager": "true"},
    )
    assert make_pool(engine).generate(prompt_of(200), 8) == with_one_more


@pytest.mark.parametrize(("first", "second"), [("vllm", "torch"), ("torch", "vllm")])
@pytest.mark.parametrize("arch", ARCHITECTURES)
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
            ours.page(page)[part] = theirs.page(source)[part]

    (token,) = ours.engine.forward([Run(prompt[199:], 199, landed, GREEDY)], before_layer=land)
    more = ours.generate([*prompt, token], 7, pages=landed, cached=200)
    assert [token, *more] == reference(arch, prompt, 8)


def test_hooks_go_by_layer_and_the_bytes_are_there(
    engine_of: EngineOf, make_pool: MakePool
) -> None:
    engine = engine_of("llama")
    pool, layout = make_pool(engine), engine.layout
    pages = pool.pages_for(40)
    calls: list[tuple[str, int]] = []
    seen: list[bytes] = []

    def after(layer: int) -> None:
        calls.append(("after", layer))
        part = slice(layer * layout.layer_bytes, (layer + 1) * layout.layer_bytes)
        seen.append(bytes(pool.page(pages[0])[part]))

    engine.forward(
        [Run(prompt_of(40), 0, pages, GREEDY)],
        before_layer=lambda layer: calls.append(("before", layer)),
        after_layer=after,
    )
    layers = range(layout.n_layers)
    assert calls == [call for layer in layers for call in (("before", layer), ("after", layer))]
    assert b"".join(seen) == bytes(pool.page(pages[0]))


def test_a_hook_that_fails_ends_the_pass_alone(engine_of: EngineOf, make_pool: MakePool) -> None:
    pool = make_pool(engine_of("llama"))
    expected = pool.generate(prompt_of(40), 4)

    def fail(layer: int) -> None:
        if layer == 1:
            raise ConnectionError("the blocks did not come")

    with pytest.raises(ConnectionError, match="did not come"):
        pool.engine.forward([Run([1, 2], 0, pool.pages_for(2), GREEDY)], before_layer=fail)
    assert pool.generate(prompt_of(40), 4) == expected


def test_what_an_owner_left_in_a_page_is_nothing(engine_of: EngineOf, make_pool: MakePool) -> None:
    engine = engine_of("llama")
    pool = make_pool(engine)
    pages = pool.pages_for(40)
    expected = pool.generate(prompt_of(40), 8, pages=[*pages, *pool.pages_for(1)])
    # All slots of the mirror become no numbers, by way of the pool.
    for page in pages:
        pool.page(page)[:] = b"\xff" * pool.size
    engine.forward([Run([5], 63, pages, None)])
    assert pool.generate(prompt_of(40), 8, pages=[*pages, *pool.pages_for(1)]) == expected


def test_seeds_and_penalties_are_those_of_torch(engine_of: EngineOf, make_pool: MakePool) -> None:
    wanted = [
        Sampling(temperature=0.8, top_p=0.9, seed=11),
        Sampling(temperature=0.0, presence_penalty=1.5),
        Sampling(temperature=0.0, grammar='{"type":"boolean"}'),
    ]
    answers = [
        [
            make_pool(engine_of("qwen3", engine)).generate(prompt_of(50), 6, sampling=sampling)
            for sampling in wanted[:2]
        ]
        for engine in ("vllm", "torch")
    ]
    assert answers[0] == answers[1]


def test_compiled_models_compute_the_same(
    engine_of: EngineOf, make_pool: MakePool, reference: Reference
) -> None:
    pool = make_pool(engine_of("llama", enforce_eager="false"))
    assert pool.generate(prompt_of(300), 8, chunk=70) == reference("llama", prompt_of(300), 8)


SIZE = "tensor_parallel_size"


def test_options_and_devices_that_there_are_none_of_are_refused_by_name(
    model_of: Callable[[str], Path], reference: object
) -> None:
    model = str(model_of("llama"))
    for value in ({"tensor_parallel": "2"}, *({SIZE: text} for text in ("zwei", "0"))):
        with pytest.raises(BadEngineOption, match="tensor_parallel"):
            open_engine(model, block_size=BLOCK_SIZE, engine="vllm", engine_options=value)
    with pytest.raises(BadEngineOption, match="device is cuda, this build of vllm computes on cpu"):
        open_engine(model, block_size=BLOCK_SIZE, device="cuda", engine="vllm")


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
        single.page(page)[:] = pool.page(source)
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
