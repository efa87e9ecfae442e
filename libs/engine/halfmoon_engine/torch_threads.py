"""How a model's threads wait for each other on cores that they share with other processes."""

import os

#: About ten microseconds. GNU OpenMP spins for milliseconds by default, on a core that the
#: thread it waits for may need: three processes of two threads each on two cores ran twenty
#: times slower so, and no slower than their share with this.
_SPINS = "1000"


def limit_spin_waits() -> None:
    """Let waiting threads sleep soon. Call before torch is imported; later it does nothing.

    A policy that the environment sets already is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
