"""Python's garbage collector, told what a conductor is: much that stays, and short requests."""

import gc

#: Objects made and not yet gone before the collector looks at the young ones. By default 700, a
#: few requests on their way: it would look thirty times a second, find nothing, and have the
#: processor's caches full of what it looked at. Nearly all goes without it, as counts drop to 0.
YOUNG_OBJECTS = 5_000


def tune_gc() -> None:
    """Take all that is there out of the collector's sight, and let it look seldom.

    Were it to look through what starting made again and again, all streams would pause for tens
    of milliseconds each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
