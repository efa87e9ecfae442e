"""The loops of two backends in C, without the interpreter. Optional: `make native` builds it.

`halfmoon_transfer.backends` does all of this in Python too, over TCP and in shared memory. It looks
after whatever is unusual: see `docs/transfer/native.md`.
"""

from halfmoon_transfer_native._native import (
    RECORDS_MISSING,
    Records,
    Table,
    carry,
    copy,
    differing,
)

__all__ = ["RECORDS_MISSING", "Records", "Table", "carry", "copy", "differing"]
