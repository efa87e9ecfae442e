"""What an engine counts."""

import msgspec


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine was opened, and gauges of now."""

    #: Transfers that ended well, and the bytes they moved.
    n_transfers: int
    bytes_read: int
    bytes_written: int
    #: Transfers that ended in an error.
    n_failures: int
    #: Slices that were tried again.
    n_retries: int
    #: Transfers submitted and not done.
    n_live: int
    #: Regions registered here.
    n_regions: int
    #: Connections open now, both dialled and accepted.
    n_connections: int
    #: Regions of other processes mapped now.
    n_mappings: int
    #: Connections closed because what came was not our framing.
    n_malformed: int
