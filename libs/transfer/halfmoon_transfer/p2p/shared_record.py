"""Keep an object's record up to date during one get: read offers, publish own shards.

No process owns a record: the getter that finds a dead holder removes it.
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
    """The newest record that one getter has seen. A failed change is repeated with the next."""

    def __init__(
        self,
        catalog: ObjectCatalog,
        record: ObjectRecord,
        own: ShardSource,
        places: tuple[BufferPlace | None, ...],
    ) -> None:
        """Start with the record that was looked up.

        Args:
            catalog: the catalog that holds the record.
            record: the record as it was read.
            own: the getter as a source.
            places: by buffer, the place where other getters read our shards.
        """
        self._catalog = catalog
        self._own = own
        self._places = places
        self.newest = record
        self.shards = cut_shards(record.sizes, record.shard_bytes)
        #: True once we have every shard: a replaced record does no harm any more.
        self._complete = False

    def offers(self) -> list[ShardOffer]:
        """Return the shards of all other holders."""
        return [
            ShardOffer(each.source, each.gold, each.shards)
            for each in self.newest.holders
            if each.source != self._own
        ]

    def publish_shards(self, shards: Collection[int]) -> None:
        """Write our completed shards, if any, into the record and read those of others.

        Raises:
            ObjectReplaced: the name is another object's now, and shards are missing.
        """
        self._complete = len(shards) == len(self.shards)
        holder = ShardHolder(self._own, False, self._places, bitmap(shards, len(self.shards)))

        def change(before: ObjectRecord) -> ObjectRecord:
            return before.with_holder(holder) if shards or self._complete else before

        self._change(change)

    def remove_dead_holders(self, suspects: Iterable[ShardSource]) -> None:
        """Remove the suspected holders whose segment has ended.

        Raises:
            ObjectReplaced: the name is another object's now, and shards are missing.
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
