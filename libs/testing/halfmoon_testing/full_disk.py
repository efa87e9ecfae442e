"""Pretend that a disk is full, to a process and to those that it starts."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_files_above(n_bytes: int) -> Iterator[None]:
    """Whatever is started inside can't make larger files: a full disk, as far as it can tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
