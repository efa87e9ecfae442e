"""Large temporary objects (checkpoints) from one to many, each getter a source for the next.

No server of its own: clients agree through one record per object in the metadata store
(`record`, `catalog`), decide by `plan` and move bytes by the transfer engine (`store`).
`folder` does it with the files of a folder.
"""

from halfmoon_transfer.p2p.object_getter import GetReport
from halfmoon_transfer.p2p.object_record import ObjectRecord, ObjectSummary
from halfmoon_transfer.p2p.p2p_errors import (
    NameTaken,
    NotPublished,
    ObjectReplaced,
    P2PError,
    ShardUnavailable,
    WrongBuffers,
)
from halfmoon_transfer.p2p.p2p_settings import P2PSettings
from halfmoon_transfer.p2p.p2p_store import P2PStore

__all__ = [
    "GetReport",
    "NameTaken",
    "NotPublished",
    "ObjectRecord",
    "ObjectReplaced",
    "ObjectSummary",
    "P2PError",
    "P2PSettings",
    "P2PStore",
    "ShardUnavailable",
    "WrongBuffers",
]
