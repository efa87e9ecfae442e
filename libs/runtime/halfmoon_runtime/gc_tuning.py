"""Tune Python's garbage collector for a service: many lasting objects, short requests."""

import gc

#: New objects before a collection of the young generation. Python's default of 700 equals a few
#: requests in flight. It would collect thirty times a second, find nothing and fill the processor's
#: caches. Nearly all objects are freed without it when their reference count drops to 0.
YOUNG_OBJECTS = 5_000


def tune_gc() -> None:
    """Exclude all present objects from collection, and collect seldom.

    Collecting the objects made at start again and again would pause all streams each time: for
    tens of milliseconds in a conductor, and longer where torch is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
