"""Distribute large temporary objects (checkpoints); each getter is a source for the next one.

There is no server. Clients agree through one record per object in the metadata store
(`object_record`, `object_catalog`). A getter decides by its `fetch_plan`; the transfer engine
moves the bytes. `p2p_store` is the client, `folder_objects` applies it to the files of a folder.
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
