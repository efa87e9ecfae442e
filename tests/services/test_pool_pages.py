"""How many pages a worker takes, and what its log says of them."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_models.machine_memory import MachineMemory
from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_runtime.lifecycle import CannotStart
from halfmoon_workers.start.pool_pages import choose_pages

GIB = 1 << 30
#: 32 KiB a token, as Llama 3.2 1B has it.
LONG = FakeEngine(
    FakeModelSpec(layers=16, kv_heads=8, head_dim=64, dtype="bfloat16", max_context=131_072)
)


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(model="fake://", metrics_port=-1, **changes)


def tokens(available: int, engine: FakeEngine = LONG, **changes: Any) -> int:
    role = changes.pop("role", "decode")
    memory = MachineMemory(64 * GIB, available)
    n_pages = choose_pages(settings(**changes), engine, role, memory=memory, process_bytes=2 * GIB)
    return n_pages * engine.layout.block_size


def test_a_pool_is_as_large_as_requests_memory_and_settings_say() -> None:
    # With all defaults it has room for a longest request.
    assert tokens(60 * GIB) >= 3 * 131_072
    assert tokens(60 * GIB, role="prefill") == 2 * 131_072
    # No machine is so large that a pool takes it all, and no worker takes more than it is given.
    assert tokens(60 * GIB, memory_mib=1 << 30) == 4 * 131_072
    assert 32 * 1024 * tokens(60 * GIB, memory_mib=6 * 1024) <= 4 * GIB
    # One that is set is taken as it is.
    assert tokens(GIB, pool_mib=2048) == 65_536


def test_a_pool_of_less_than_a_context_alone_is_warned_of_with_the_size_that_it_needs() -> None:
    with capture_logs() as logs:
        held = tokens(60 * GIB, pool_mib=1024)
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert (warning["kv_tokens"], warning["max_context"]) == (held, 131_072)
    assert "--pool-mib 4096" in warning["hint"]
    with capture_logs() as logs:
        tokens(60 * GIB, pool_mib=4096)
    assert [line["log_level"] for line in logs] == ["info"]


def test_a_pool_of_less_than_a_page_is_refused_by_the_name_of_its_setting() -> None:
    wide = FakeEngine(FakeModelSpec(head_dim=4096, layers=64))
    with pytest.raises(CannotStart, match=r"pool_mib is 1: not one page of .* MiB are needed"):
        tokens(GIB, wide, pool_mib=1)


def test_memory_that_is_used_up_leaves_at_least_a_page() -> None:
    wide = FakeEngine(FakeModelSpec(head_dim=8192, layers=256))
    assert tokens(0, wide) == wide.layout.block_size
