"""How `halfmoon up` shares memory among its workers, and what it says of their pools."""

from typing import Any

from halfmoon_cli.up.embedded_cluster import ClusterPlan, plan_processes
from halfmoon_cli.up.pool_report import pool_lines
from halfmoon_cli.up.worker_memory import KVSTORE_MIB, worker_memory_mib
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_models.machine_memory import MachineMemory

HERE = MachineMemory(16 << 30, 12 << 30)
ONE_EACH = {"prefill": 1, "decode": 1, "kvstore": 1}


def share(
    counts: dict[str, int] = ONE_EACH, variables: dict[str, str] | None = None, **flags: str
) -> int:
    extra = {role: [flag] for role, flag in flags.items()}
    return worker_memory_mib(HERE, counts, extra, variables or {})


def test_workers_have_equal_shares_of_what_kvstores_and_the_system_leave() -> None:
    assert share({**ONE_EACH, "decode": 3}) == share() // 2
    assert 2 * share() + KVSTORE_MIB < 12 * 1024


def test_larger_kvstores_and_pools_leave_less_to_the_others() -> None:
    assert share(kvstore="--capacity-mib=3072") == share() - 1024
    assert share(decode="--pool-mib=2048") == share() - 1024
    assert share(variables={"HALFMOON_CAPACITY_MIB": "3072"}) == share() - 1024


def test_memory_that_a_role_is_given_is_not_shared_again() -> None:
    assert share(decode=f"--memory-mib={share()}") - share() in (0, 1)
    assert share(variables={"HALFMOON_MEMORY_MIB": "2048"}) == 0


def test_numbers_that_are_none_are_left_to_the_process_that_refuses_them() -> None:
    assert share(kvstore="--capacity-mib=much") == share()


def test_a_full_machine_shares_the_least_and_an_unknown_one_nothing() -> None:
    assert worker_memory_mib(MachineMemory(1 << 30, 0), ONE_EACH, {}, {}) == 1
    assert worker_memory_mib(MachineMemory(None, None), ONE_EACH, {}, {}) == 0


def test_a_kvstore_is_counted_with_the_memory_that_it_takes_by_default() -> None:
    assert KvstoreSettings(worker_id="k").capacity_mib == KVSTORE_MIB


def test_workers_are_told_their_share_unless_a_role_has_its_own() -> None:
    extra = {"decode": ["--memory-mib=99"]}
    plan = ClusterPlan(model="m", http_port=1, memory_mib=700, device_share=0.5, extra=extra)
    specs = {spec.role: spec.arguments for spec in plan_processes(plan)}
    assert "700" in specs["prefill"]
    assert "700" not in specs["decode"]
    assert all("--device-share" in specs[role] for role in ("prefill", "decode"))
    assert not any("--memory-mib" in specs[role] for role in ("conductor", "kvstore"))


def record(tokens: int, longest: int = 131_072, **more: Any) -> dict[str, Any]:
    usual = {"token_bytes": 32_768, "dtype": "bfloat16", "stage": "ready", "pid": 7}
    return {**usual, "kv_tokens": tokens, "max_context": longest, **more}


def test_each_role_s_tokens_are_said_and_the_longest_request_that_fits() -> None:
    lines, warnings = pool_lines(
        [("decode", record(200_000)), ("decode", record(200_000)), ("prefill", record(131_072))]
    )
    assert lines == [
        "decode: 2 workers × 200,000 tokens; longest request 131,072",
        "prefill: 1 worker × 131,072 tokens; longest request 131,072",
    ]
    assert not warnings


def test_too_small_pools_are_warned_of_with_the_ways_out() -> None:
    small = [("decode", record(12_345, dtype="float32")), ("decode", record(23_456))]
    (line,), (warning,) = pool_lines(small)
    assert line == "decode: 2 workers × 12,345 to 23,456 tokens; longest request 23,456"
    assert "holds 23,456 tokens, and the model's context is 131,072" in warning
    assert "--decode 1" in warning
    assert "-o decode.pool-mib=4096" in warning
    _, (half,) = pool_lines(small[:1])
    assert "bfloat16" in half
    assert "--decode 1" not in half


def test_processes_without_a_pool_are_said_nothing_of() -> None:
    assert pool_lines([("conductor", {"stage": "ready"}), ("decode", {"kv_tokens": "9"})]) == (
        [],
        [],
    )
