"""Move bytes between registered regions of memory: one-sided, checksummed, acknowledged."""

from halfmoon_transfer.cluster_key import ClusterKey
from halfmoon_transfer.encryption_setting import encryption_from_environment
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import (
    Cancelled,
    Corrupted,
    Lost,
    Notification,
    Op,
    Overloaded,
    Piece,
    Rejected,
    Report,
    TimedOut,
    Transfer,
    TransferError,
    Untrusted,
)
from halfmoon_transfer.regions.region_table import Memory
from halfmoon_transfer.settings import TransferSettings
from halfmoon_transfer.transfers.transfer_stats import TransferStats

__all__ = [
    "Cancelled",
    "ClusterKey",
    "Corrupted",
    "Lost",
    "Memory",
    "Notification",
    "Op",
    "Overloaded",
    "Piece",
    "Rejected",
    "Report",
    "TimedOut",
    "Transfer",
    "TransferEngine",
    "TransferError",
    "TransferSettings",
    "TransferStats",
    "Untrusted",
    "encryption_from_environment",
]
