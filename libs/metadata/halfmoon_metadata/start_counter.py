"""Count the starts of a process, whose records may outlive the counter.

After a metadata server lost its data, live processes write their records again, but no counter.
"""

from collections.abc import Mapping

from halfmoon_metadata.store_interface import MetadataStore

#: A record's generation is at most so far above the counter of starts, which may be lost.
_MAX_LOST_STARTS = 100_000


class ImplausibleGeneration(Exception):
    """A record has a generation that no counted start can have."""


def count_start(
    store: MetadataStore, counter: str, there: Mapping[str, int], *, above: int = 0
) -> int:
    """Count one more start; return its generation, which is above all earlier ones.

    Args:
        store: the metadata server.
        counter: key of the counter.
        there: generations in the records that are there, by key.
        above: generation of an earlier start, known to the caller.

    Raises:
        ImplausibleGeneration: a record is not one that a counted start wrote.
        MetadataError: the store fails.
    """
    generation = store.increment(counter)
    for key, earlier in there.items():
        if earlier - max(above, generation) > _MAX_LOST_STARTS:
            raise ImplausibleGeneration(
                f"the record {key!r} has generation {earlier}, and {generation} starts were "
                "counted: delete that record, then start again"
            )
    while generation <= max(above, *there.values()):
        generation = store.increment(counter)
    return generation
