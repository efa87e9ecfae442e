"""Pretend that a disk is full, to a process and to those that it starts."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_files_above(n_bytes: int) -> Iterator[None]:
    """Limit the files of this process, and of those started inside, to this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
