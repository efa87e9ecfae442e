"""Share a machine's memory among the workers that `halfmoon up` starts on it."""

from collections.abc import Mapping, Sequence

from halfmoon_models.machine_memory import MachineMemory
from halfmoon_models.pool_size import MIB, worker_budget
from halfmoon_runtime.setting_names import ENVIRONMENT_PREFIX

#: Memory of a kvstore whose user sets none, in MiB: that of its settings.
KVSTORE_MIB = 1024


def worker_memory_mib(
    memory: MachineMemory,
    counts: Mapping[str, int],
    flags: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
) -> int:
    """Return the MiB of each worker for weights and KV pages; 0: each shall see for itself.

    Args:
        memory: of the machine, before the cluster starts.
        counts: processes of each role.
        flags: that their user sets, by role.
        environment: variables of all processes.
    """

    def of(role: str, name: str, usual: int) -> int:
        start = f"--{name}="
        given = [flag.removeprefix(start) for flag in flags.get(role, ()) if flag.startswith(start)]
        variable = f"{ENVIRONMENT_PREFIX}{name.replace('-', '_').upper()}"
        text = given[-1] if given else environment.get(variable, "")
        # Other texts are refused by the process itself.
        return int(text) if text.isdecimal() and len(text) < 12 else usual

    workers = {role: counts.get(role, 0) for role in ("prefill", "decode")}
    chosen = {role: of(role, "memory-mib", 0) for role in workers}
    n_kvstores = counts.get("kvstore", 0)
    taken = n_kvstores * of("kvstore", "capacity-mib", KVSTORE_MIB)
    taken += sum(n * (chosen[role] or of(role, "pool-mib", 0)) for role, n in workers.items())
    budget = worker_budget(
        memory,
        n_workers=sum(n for role, n in workers.items() if not chosen[role]),
        n_processes=1 + n_kvstores,
        taken_bytes=taken * MIB,
    )
    # Where a variable says it for all of them, no flag says another number.
    if budget is None or environment.get(f"{ENVIRONMENT_PREFIX}MEMORY_MIB"):
        return 0
    return max(1, budget // MIB)
