"""The loops of the TCP backend in C, without the interpreter. Optional: `make native` builds it.

`halfmoon_transfer.backends.tcp` does all of this in Python too, and looks after whatever is
unusual: see `docs/transfer/native.md`.
"""

from halfmoon_transfer_native._native import Table, carry

__all__ = ["Table", "carry"]
