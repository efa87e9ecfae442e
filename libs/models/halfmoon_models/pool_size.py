"""Choose how much memory a worker takes for KV pages: by its model, and by what is there.

A worker wants pages for a few of its model's longest sequences. It gets them as far as its share of
the memory has room beside the weights. Pages are taken from the system when they are first written.
"""

from dataclasses import dataclass

from halfmoon_models.machine_memory import MachineMemory

MIB = 1 << 20
#: Bytes of pages that a model with a short context gets, where there is room.
USUAL_BYTES = 1024 * MIB
#: Bytes of pages that are tried even where memory seems to be used up.
LEAST_BYTES = 64 * MIB
#: Longest sequences that a pool has room for, where memory allows. At a prefill worker one is
#: computed and another arrives; at a decode worker several run at once.
PREFILL_CONTEXTS = 2
DECODE_CONTEXTS = 4
#: Bytes beside weights and pages, for activations, logits and buffers: a share, and the most.
WORKING_SHARE = 1 / 8
WORKING_BYTES = 512 * MIB
#: Share of a container's memory, or a device's, that its worker takes: all of it but a rest for
#: what can't be foreseen.
OWN_SHARE = 0.9
#: Share of what is free that a worker takes which does not know of its neighbours.
NEIGHBOUR_SHARE = 0.25
#: What is left to the system and to other programs: a share of all memory, and the least bytes.
SYSTEM_SHARE = 0.1
SYSTEM_BYTES = 512 * MIB
#: Bytes of a process without a model, such as the conductor.
PROCESS_BYTES = 256 * MIB


@dataclass(frozen=True)
class PoolRoom:
    """Say where the bytes of an engine's pool lie, and what a device has left for them."""

    #: Bytes of host memory for each byte of the pool: 2 where the engine keeps a mirror there too.
    n_host_copies: int = 1
    #: Bytes that the pool's device has left, all that it has, and what this process uses of them;
    #: None: the pool is on no device.
    device_free: int | None = None
    device_total: int = 0
    device_used: int = 0
    #: False: the engine can't tell what room there is, as its memory belongs to other processes.
    is_known: bool = True


def wanted_bytes(block_bytes: int, block_size: int, max_context: int, n_contexts: int) -> int:
    """Return the bytes of the pool that a worker would have, if memory were no matter.

    Args:
        block_bytes: of a page.
        block_size: tokens of a page.
        max_context: tokens of the model's longest sequence; 0: it has no limit.
        n_contexts: longest sequences that are to fit.
    """
    context_bytes = -(-max_context // block_size) * block_bytes
    return max(USUAL_BYTES, n_contexts * context_bytes)


def room_bytes(
    room: PoolRoom,
    memory: MachineMemory,
    *,
    process_bytes: int,
    memory_bytes: int = 0,
    device_share: float = 1.0,
) -> int | None:
    """Return the bytes of pages that there is room for; None: unknown.

    Args:
        room: where the pool lies.
        memory: of the machine, once the weights are loaded.
        process_bytes: of this worker, weights included.
        memory_bytes: most bytes of host memory for this worker with its weights; 0: unknown.
        device_share: part of the device's memory that this worker may take.
    """
    if not room.is_known:
        return None
    rooms: list[int] = []
    if room.n_host_copies and (budget := _host_budget(memory, process_bytes, memory_bytes)):
        rooms.append((_without_working(budget) - process_bytes) // room.n_host_copies)
    if room.device_free is not None:
        mine = int(OWN_SHARE * device_share * room.device_total) - room.device_used
        rooms.append(min(mine, int(OWN_SHARE * room.device_free)) - WORKING_BYTES)
    return max(LEAST_BYTES, min(rooms)) if rooms else None


def _without_working(n_bytes: int) -> int:
    return n_bytes - min(WORKING_BYTES, int(WORKING_SHARE * n_bytes))


def _host_budget(memory: MachineMemory, process_bytes: int, memory_bytes: int) -> int | None:
    """Return the most bytes of host memory that a worker may hold; None: unknown."""
    if memory_bytes:
        return memory_bytes
    if memory.available is None or memory.total is None:
        return None
    if memory.is_limited:
        return min(int(OWN_SHARE * memory.total), process_bytes + memory.available)
    return process_bytes + int(NEIGHBOUR_SHARE * memory.available)


def worker_budget(
    memory: MachineMemory, *, n_workers: int, n_processes: int, taken_bytes: int
) -> int | None:
    """Return the bytes of each of several workers that start together; None: unknown.

    Args:
        memory: of the machine, before any of them is started.
        n_workers: workers with a model.
        n_processes: other processes that are started with them.
        taken_bytes: of kvstores, and of pools whose size is set.
    """
    if memory.available is None or memory.total is None:
        return None
    system = max(SYSTEM_BYTES, int(SYSTEM_SHARE * memory.total))
    rest = memory.available - system - n_processes * PROCESS_BYTES - taken_bytes
    return max(0, rest) // max(1, n_workers)
