"""Large temporary objects (checkpoints) from one to many, each getter a source for the next.

No server of its own: clients agree through one record per object in the metadata store
(`record`, `catalog`), decide by `plan` and move bytes by the transfer engine (`store`).
`folder` does it with the files of a folder.
"""

from halfmoon_transfer.p2p.errors import (
    NameTaken,
    NotPublished,
    P2PError,
    Replaced,
    Unavailable,
    WrongBuffers,
)
from halfmoon_transfer.p2p.getting import GetReport
from halfmoon_transfer.p2p.record import Record, Summary
from halfmoon_transfer.p2p.settings import P2PSettings
from halfmoon_transfer.p2p.store import P2PStore

__all__ = [
    "GetReport",
    "NameTaken",
    "NotPublished",
    "P2PError",
    "P2PSettings",
    "P2PStore",
    "Record",
    "Replaced",
    "Summary",
    "Unavailable",
    "WrongBuffers",
]
