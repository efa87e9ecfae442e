"""Check every byte of mixed transfers over two TCP paths, one of them cut at random.

    python benchmarks/transfer_soak.py [transfers, 10000] [seed, 1]

The second path leads through a forwarder that holds its bytes while it is cut, and delivers them
afterwards. Prints the faults and the leftovers; ends with 1 if there are any faults.
"""

import gc
import random
import sys
import threading
import time
import tracemalloc

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_testing.transfer_soak import TcpValve, TransferSoak
from halfmoon_transfer import TransferEngine, TransferSettings
from halfmoon_transfer.backends.addresses import split_address

SETTINGS = TransferSettings(
    slice_bytes=64 * 1024,
    lanes=4,
    tries_per_path=20,
    rail_stall_s=0.3,
    rail_cooldown_s=0.1,
    rail_cooldown_max_s=1.0,
)
N_WORKERS = 8
HOSTS = ("127.0.0.1", "127.0.0.2")


def cut_and_mend(valve: TcpValve, over: threading.Event, seed: int) -> int:
    """Until it is over; how often."""
    dice, n_cuts = random.Random(seed), 0
    while not over.is_set():
        valve.shut()
        n_cuts += 1
        over.wait(dice.uniform(0.05, 0.8))
        valve.open()
        over.wait(dice.uniform(0.05, 0.4))
    return n_cuts


def open_pair(valve: TcpValve) -> tuple[TransferEngine, TransferEngine]:
    """An engine, and one that it reaches directly and through the valve."""
    store = MemoryStore()
    there = TransferEngine.open(
        "there",
        metadata=store,
        backends=("tcp",),
        bind=HOSTS,
        advertise=(HOSTS[0], valve.address),
        settings=SETTINGS,
    )
    # The valve hides the second listener's port; what it forwards to is the same engine.
    valve.target = split_address(there.descriptor.endpoints["tcp"].address, 0)
    here = TransferEngine.open("here", metadata=store, backends=("tcp",), settings=SETTINGS)
    return here, there


def left_over(here: TransferEngine, there: TransferEngine) -> str:
    gc.collect()
    return (
        f"{here.stats().n_connections + there.stats().n_connections} connections, "
        f"{threading.active_count()} threads, "
        f"{tracemalloc.get_traced_memory()[0] / 1024:.0f} KiB of Python memory"
    )


def main(n_transfers: int, seed: int) -> int:
    with TcpValve(HOSTS[1]) as valve:
        here, there = open_pair(valve)
        with here, there:
            tracemalloc.start()
            soak = TransferSoak(here, there, n_workers=N_WORKERS, seed=seed)
            soak.run(N_WORKERS * 10, 60.0)
            here.release_peer("there")
            time.sleep(1.0)
            print(f"before: {left_over(here, there)}")
            over = threading.Event()
            n_cuts: list[int] = []
            bad_luck = threading.Thread(
                target=lambda: n_cuts.append(cut_and_mend(valve, over, seed))
            )
            bad_luck.start()
            started = time.monotonic()
            result = soak.run(n_transfers, 60.0)
            seconds = time.monotonic() - started
            over.set()
            bad_luck.join()
            content = soak.far_bytes()
            here.release_peer("there")
            time.sleep(3.0)
            late = soak.far_bytes() != content
            del content
            print(f"after:  {left_over(here, there)}")
            print(
                f"{result.n_done} transfers, {result.n_bytes / 1e6:.0f} MB in {seconds:.1f} s, "
                f"the path cut {n_cuts[0]} times, {result.n_retries} slices tried again"
            )
            print(
                f"errors {len(result.errors)}, wrong {len(result.wrong)}, landed late {late}, "
                f"reported twice {result.n_reported_twice}, notifications {result.n_notified}, "
                f"of them not once {result.n_notified_wrong}"
            )
            for line in (*result.errors, *result.wrong)[:10]:
                print(f"  {line}")
            soak.release()
            del soak
    print(f"closed: {left_over(here, there)}")
    bad = result.errors or result.wrong or late or result.n_reported_twice
    return 1 if bad or result.n_notified_wrong else 0


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:]]
    sys.exit(main(*(numbers + [10_000, 1][len(numbers) :])))
