"""Share a machine's cores among the workers that compute on it."""

#: Threads of all computing workers together, for each core. At 2, a prefill and a decode worker
#: have all cores each: a core idles only when both wait. At 1, no two threads share a core.
THREADS_PER_CORE = 2


def worker_threads(n_cores: int, n_workers: int) -> int:
    """Return the threads of one worker, from 1 to `n_cores`.

    Args:
        n_cores: cores of the machine.
        n_workers: prefill and decode workers on it.
    """
    return max(1, min(n_cores, THREADS_PER_CORE * n_cores // n_workers))
