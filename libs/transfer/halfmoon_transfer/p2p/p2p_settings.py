"""Define the settings of a P2P client, read once and handed down."""

import msgspec

MIB = 1024 * 1024
_MIN_SHARD_BYTES = MIB
_MAX_SHARD_BYTES = 64 * MIB
#: Shards per object: enough to make getters sources early, few enough for a small record.
_SHARDS = 128


class P2PSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and timeouts of a P2P client."""

    #: Shards that one getter fetches at once.
    parallel: int = 4
    #: Timeout of fetching one shard from one source; then another source is asked.
    shard_timeout_s: float = 30.0
    #: Tries of one shard at one source.
    tries_per_source: int = 3
    #: After so many failures in a row a source is not asked any more.
    strikes: int = 3
    #: Seconds of waiting for new sources while the missing shards have none.
    patience_s: float = 3.0


def shard_bytes_for(n_bytes: int) -> int:
    """Choose the shard size of an object: a whole number of MiB."""
    wanted = -(-n_bytes // (_SHARDS * MIB)) * MIB
    return min(max(wanted, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES)
