"""The numbers of a P2P client, read once and handed down."""

import msgspec

MIB = 1024 * 1024
_MIN_SHARD_BYTES = MIB
_MAX_SHARD_BYTES = 64 * MIB
#: So many make getters sources early, and keep the record small.
_SHARDS = 128


class P2PSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and patience."""

    #: Shards being fetched at once by one getter.
    parallel: int = 4
    #: Patience with a source for one shard; then another one is asked.
    shard_timeout_s: float = 30.0
    #: How often one source may fail one shard.
    tries_per_source: int = 3
    #: After so many failures in a row a source is not asked any more.
    strikes: int = 3
    #: How long to look for new sources of shards that nobody has, before giving up.
    patience_s: float = 3.0


def shard_bytes_for(n_bytes: int) -> int:
    """A good shard size for an object: a whole number of MiB."""
    wanted = -(-n_bytes // (_SHARDS * MIB)) * MIB
    return min(max(wanted, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES)
