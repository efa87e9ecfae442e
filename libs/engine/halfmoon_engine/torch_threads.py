"""Make a model's threads yield cores that they share with other processes."""

import os

#: About ten microseconds. GNU OpenMP spins for milliseconds by default, on a core that the other
#: thread may need. Three processes of two threads each on two cores ran twenty times slower with
#: the default, and at their share of the speed with this.
_SPINS = "1000"


def limit_spin_waits() -> None:
    """Let waiting threads sleep soon. Call before torch is imported; later it does nothing.

    A policy that the environment sets already is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
