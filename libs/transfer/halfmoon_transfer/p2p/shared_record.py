"""An object's record during one get: others' shards are read from it, ours are told in it.

Nobody is in charge of a record: a holder that died is removed by whoever finds it out.
"""

import logging
from collections.abc import Callable, Collection, Iterable

from halfmoon_metadata.store import MetadataError
from halfmoon_transfer.p2p.catalog import Catalog
from halfmoon_transfer.p2p.errors import P2PError, Replaced
from halfmoon_transfer.p2p.plan import Offer
from halfmoon_transfer.p2p.record import Holder, Place, Record, Source, bitmap, cut

_log = logging.getLogger(__name__)


class SharedRecord:
    """The newest that one getter has seen. What can't be said now is said later."""

    def __init__(
        self, catalog: Catalog, record: Record, own: Source, places: tuple[Place | None, ...]
    ) -> None:
        """Start with what was looked up.

        Args:
            catalog: where the record is.
            record: as it was read.
            own: who gets it.
            places: by buffer, where others read what we have.
        """
        self._catalog = catalog
        self._own = own
        self._places = places
        self.newest = record
        self.shards = cut(record.sizes, record.shard_bytes)
        #: We have everything: what becomes of the record is no matter any more.
        self._complete = False

    def offers(self) -> list[Offer]:
        """What others have."""
        return [
            Offer(each.source, each.gold, each.shards)
            for each in self.newest.holders
            if each.source != self._own
        ]

    def announce(self, here: Collection[int]) -> None:
        """Say what we have, if anything, and hear what others have.

        Raises:
            Replaced: the name is another object's now, and shards are missing.
        """
        self._complete = len(here) == len(self.shards)
        holder = Holder(self._own, False, self._places, bitmap(here, len(self.shards)))

        def change(before: Record) -> Record:
            return before.with_holder(holder) if here or self._complete else before

        self._change(change)

    def strike_out(self, suspects: Iterable[Source]) -> None:
        """Take those holders out whose segment is over.

        Raises:
            Replaced: the name is another object's now, and shards are missing.
        """
        self._change(lambda before: before.without(filter(self._catalog.is_gone, suspects)))

    def _change(self, change: Callable[[Record], Record]) -> None:
        publication = self.newest.publication

        def change_ours(before: Record | None) -> Record | None:
            ours = before is not None and before.publication == publication
            return change(before) if before is not None and ours else before

        try:
            after = self._catalog.change(self.newest.name, change_ours)
        except (MetadataError, P2PError) as error:
            _log.warning("object %s: %s", self.newest.name, error)
            return
        if after is not None and after.publication == publication:
            self.newest = after
        elif after is not None and not self._complete:
            raise Replaced(f"another object was published as {after.name} while it was fetched")
