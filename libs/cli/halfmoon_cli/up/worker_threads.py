"""Share a machine's cores among the workers that compute on it."""

from collections.abc import Mapping

#: Threads of all computing workers together, for each core. At 2, a prefill and a decode worker
#: have all cores each: a core idles only when both wait. At 1, no two threads share a core.
THREADS_PER_CORE = 2


def worker_threads(
    n_cores: int, n_prefill: int, n_decode: int, engine: str = "torch"
) -> Mapping[str, int]:
    """Return the threads of one worker of each role, from 1 to `n_cores`.

    A decode worker with vLLM shares no core with another worker's thread of its kind: all its
    threads wait for the slowest one several times in each layer. Beside a prefill on the same
    cores its slowest steps took four times as long.

    Args:
        n_cores: cores of the machine.
        n_prefill: prefill workers on it.
        n_decode: decode workers on it.
        engine: of all of them.
    """
    n_workers = max(1, n_prefill + n_decode)
    shared = max(1, min(n_cores, THREADS_PER_CORE * n_cores // n_workers))
    alone = max(1, n_cores // n_workers)
    return {"prefill": shared, "decode": alone if engine == "vllm" else shared}
