"""What every engine promises around a forward, real or fake: hooks, pages, refusals."""

from typing import Any

import pytest

from halfmoon_engine.errors import PoolNotAttached
from halfmoon_engine.interface import Draw, Run
from halfmoon_engine.load import open_engine
from halfmoon_protocol.errors import ProtocolError
from halfmoon_protocol.sampling import Sampling
from tests.engine.chained_engine import ChainedEngine
from tests.engine.driver import Driver, EngineOf, Tiny, open_tiny

GREEDY = Draw(Sampling(temperature=0.0))


FAKE = "fake://tiny?layers=3&vocab=384"


@pytest.fixture(
    params=["fake", "fake in stages", "torch", "torch in stages", "torch with a mirrored pool",
            "torch in bfloat16"]
)  # fmt: skip
def engine(request: pytest.FixtureRequest, tiny: Tiny, engine_of: EngineOf) -> Any:
    match request.param:
        case "fake":
            return open_engine(FAKE, block_size=16)
        case "fake in stages" | "torch in stages":
            spec = tiny("qwen3") if request.param.startswith("torch") else FAKE
            return ChainedEngine([open_tiny(spec, stage_index=i, n_stages=3) for i in range(3)])
        case "torch":
            return engine_of("qwen3")
        case "torch in bfloat16":
            return engine_of("gemma2", dtype="bfloat16")
        case _:
            loaded = open_tiny(tiny("mistral"), native="off")
            loaded._runner._mirror = True
            return loaded


@pytest.fixture
def driver(engine: Any) -> Any:
    return Driver(engine, 600)


def test_hooks_go_layer_by_layer_before_then_after(driver: Any, engine: Any) -> None:
    calls: list[tuple[str, int]] = []
    engine.forward(
        [Run([4, 5, 6], 0, driver.pages_for(3), None), Run([9], 0, driver.pages_for(1), GREEDY)],
        before_layer=lambda layer: calls.append(("before", layer)),
        after_layer=lambda layer: calls.append(("after", layer)),
    )
    layers = range(engine.layout.n_layers)
    assert calls == [call for layer in layers for call in (("before", layer), ("after", layer))]


def test_a_layers_kv_is_in_the_pool_when_after_layer_says_so(driver: Any, engine: Any) -> None:
    layout = engine.layout
    pages = driver.pages_for(40)
    at_the_time: dict[int, list[bytes]] = {}

    def layer_of(page: int, layer: int) -> bytes:
        begin = layer * layout.layer_bytes
        return bytes(driver.page_bytes(page)[begin : begin + layout.layer_bytes])

    def snapshot(layer: int) -> None:
        at_the_time[layer] = [layer_of(page, layer) for page in pages]
        for later in range(layer + 1, layout.n_layers):
            assert set(layer_of(pages[0], later)) == {255}, "a layer was written before its turn"

    engine.forward([Run(list(range(40)), 0, pages, GREEDY)], after_layer=snapshot)
    for layer in range(layout.n_layers):
        assert at_the_time[layer] == [layer_of(page, layer) for page in pages]
    assert set(layer_of(pages[0], 0)) != {255}


def test_only_the_runs_own_slots_are_written(driver: Any, engine: Any) -> None:
    layout = engine.layout
    pages = driver.pages_for(20)
    before = bytes(driver.pool)
    engine.forward([Run(list(range(5)), 0, pages, None)])
    changed = {i for i, (a, b) in enumerate(zip(before, driver.pool, strict=True)) if a != b}
    row = layout.layer_bytes // 2 // layout.block_size
    allowed = {
        pages[0] * layout.block_bytes + side * 16 * row + byte
        for side in range(2 * layout.n_layers)
        for byte in range(5 * row)
    }
    assert changed <= allowed
    assert len(changed) > 0.9 * len(allowed)


def test_kv_that_lands_layer_by_layer_is_what_is_read(driver: Any, engine: Any) -> None:
    layout = engine.layout
    prompt = [11 * i % 380 for i in range(70)]
    theirs = driver.pages_for(80)
    (first,) = engine.forward([Run(prompt, 0, theirs, GREEDY)])
    blocks = [bytes(driver.page_bytes(page)) for page in theirs]
    assert isinstance(first, int)
    expected = engine.forward([Run([first], 70, theirs, GREEDY)])

    other = Driver(engine, 600, seed=5)
    # A forward before, so that anything kept of these pages' earlier content is stale.
    ours = other.pages_for(80)
    engine.forward([Run([1] * 80, 0, ours, GREEDY)])

    def land(layer: int) -> None:
        part = slice(layer * layout.layer_bytes, (layer + 1) * layout.layer_bytes)
        for page, block in zip(ours, blocks, strict=True):
            other.page_bytes(page)[part] = block[part]

    assert engine.forward([Run([first], 70, ours, GREEDY)], before_layer=land) == expected


def test_a_step_that_continues_equals_one_that_fetches(driver: Any, engine: Any) -> None:
    pages = driver.pages_for(60)
    engine.forward([Run(list(range(50)), 0, pages, None)])
    for start, token in ((50, 3), (51, 4)):
        fetching = engine.forward([Run([token], start, pages, GREEDY)])
        assert engine.forward([Run([token], start, pages, GREEDY, continues=True)]) == fetching


def test_an_exception_in_a_hook_ends_that_forward_alone(driver: Any, engine: Any) -> None:
    class Gone(Exception):
        pass

    def fail(layer: int) -> None:
        raise Gone

    run = Run([1, 2, 3], 0, driver.pages_for(3), GREEDY)
    expected = engine.forward([run])
    with pytest.raises(Gone):
        engine.forward([run], before_layer=fail)
    with pytest.raises(Gone):
        engine.forward([run], after_layer=fail)
    assert engine.forward([run]) == expected


def test_a_run_out_of_bounds_is_refused_and_none_is_nothing(driver: Any, engine: Any) -> None:
    longest = engine.max_context
    too_long = Run([1], longest, [0] * engine.layout.blocks_for(longest + 1), None)
    for run, named in (
        (Run([], 0, [0], None), "0 tokens"),
        (Run([1] * 17, 0, [0], None), "hold 16"),
        (Run([1], 0, [999], None), "page 999"),
        (Run([1], -1, [0], None), "position -1"),
        (too_long, f"the model allows {longest}"),
    ):
        with pytest.raises(ValueError, match=named):
            engine.forward([run])
    assert engine.forward([]) == []


def test_a_detached_engine_has_no_pool_and_the_memory_is_free(driver: Any, engine: Any) -> None:
    engine.forward([Run([1], 0, [0], None)])
    engine.detach()
    with pytest.raises(PoolNotAttached):
        engine.forward([Run([1], 0, [0], None)])
    with pytest.raises(PoolNotAttached):
        engine.measure()
    driver.pool.extend(b"x")  # a bytearray in use refuses to grow


def test_a_pool_must_be_writable_and_hold_a_page(engine: Any) -> None:
    with pytest.raises(ValueError, match="read-only"):
        engine.attach(memoryview(bytes(engine.layout.block_bytes)))
    with pytest.raises(ValueError, match="holds no page"):
        engine.attach(memoryview(bytearray(engine.layout.block_bytes - 1)))


def test_block_sizes_outside_the_protocols_are_refused(tiny: Tiny) -> None:
    for spec in ("fake://tiny", str(tiny("llama"))):
        with pytest.raises(ProtocolError, match="block_size is 8"):
            open_engine(spec, block_size=8)


def test_costs_are_measured_on_the_pool(driver: Any, engine: Any) -> None:
    prefill, decode = engine.measure()
    assert prefill.c1_s > 0 or prefill.c0_s > 0 or prefill.c2_s > 0
    assert decode.d0_s > 0 or decode.d1_s > 0 or decode.d2_s > 0
    assert min(prefill.c0_s, prefill.c1_s, prefill.c2_s) >= 0
    assert min(decode.d0_s, decode.d1_s, decode.d2_s) >= 0
