"""An object's record during one get: others' shards are read from it, ours are told in it.

Nobody is in charge of a record: a holder that died is removed by whoever finds it out.
"""

import logging
from collections.abc import Callable, Collection, Iterable

from halfmoon_metadata.store_interface import MetadataError
from halfmoon_transfer.p2p.fetch_plan import ShardOffer
from halfmoon_transfer.p2p.object_catalog import ObjectCatalog
from halfmoon_transfer.p2p.object_record import (
    BufferPlace,
    ObjectRecord,
    ShardHolder,
    ShardSource,
    bitmap,
    cut_shards,
)
from halfmoon_transfer.p2p.p2p_errors import ObjectReplaced, P2PError

_log = logging.getLogger(__name__)


class SharedRecord:
    """The newest that one getter has seen. What can't be said now is said later."""

    def __init__(
        self,
        catalog: ObjectCatalog,
        record: ObjectRecord,
        own: ShardSource,
        places: tuple[BufferPlace | None, ...],
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
        self.shards = cut_shards(record.sizes, record.shard_bytes)
        #: We have everything: what becomes of the record is no matter any more.
        self._complete = False

    def offers(self) -> list[ShardOffer]:
        """What others have."""
        return [
            ShardOffer(each.source, each.gold, each.shards)
            for each in self.newest.holders
            if each.source != self._own
        ]

    def announce(self, here: Collection[int]) -> None:
        """Say what we have, if anything, and hear what others have.

        Raises:
            Replaced: the name is another object's now, and shards are missing.
        """
        self._complete = len(here) == len(self.shards)
        holder = ShardHolder(self._own, False, self._places, bitmap(here, len(self.shards)))

        def change(before: ObjectRecord) -> ObjectRecord:
            return before.with_holder(holder) if here or self._complete else before

        self._change(change)

    def remove_dead_holders(self, suspects: Iterable[ShardSource]) -> None:
        """Take those holders out whose segment is over.

        Raises:
            Replaced: the name is another object's now, and shards are missing.
        """
        self._change(lambda before: before.without(filter(self._catalog.is_gone, suspects)))

    def _change(self, change: Callable[[ObjectRecord], ObjectRecord]) -> None:
        publication = self.newest.publication

        def change_ours(before: ObjectRecord | None) -> ObjectRecord | None:
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
            raise ObjectReplaced(
                f"another object was published as {after.name} while it was fetched"
            )
