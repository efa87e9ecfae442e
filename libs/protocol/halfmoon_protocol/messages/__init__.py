"""Define every message on a Halfmoon socket.

A module has the messages between two kinds of services; `by_receiver` lists them by receiver.
"""

from halfmoon_protocol.messages.base import Message
from halfmoon_protocol.messages.by_receiver import (
    ToConductor,
    ToDecode,
    ToKvstore,
    ToKvstoreClient,
    ToPrefill,
    ToWorker,
)
from halfmoon_protocol.messages.decode import (
    AnswerChain,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    Produced,
    ReserveDecode,
    StartDecode,
    TokensProduced,
)
from halfmoon_protocol.messages.kvstore import (
    BlocksCommitted,
    BlocksLeased,
    BlocksReplicated,
    BlocksReserved,
    BlocksSnapshot,
    CommitBlocks,
    DropBlocks,
    KvstoreLoad,
    KvstoreRefused,
    LeaseBlocks,
    Place,
    ReleaseLease,
    RenewLease,
    ReplicateBlocks,
    ReserveBlocks,
    RevokeBlocks,
    SnapshotBlocks,
    VerifyBlocks,
)
from halfmoon_protocol.messages.membership import (
    Cancel,
    ChangeRole,
    DecodeCost,
    Hello,
    PrefillCost,
    Role,
    Stage,
    Unwelcome,
    Welcome,
    WorkerInfo,
)
from halfmoon_protocol.messages.prefill import (
    CachedPrefix,
    KvstoreAddress,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    PrefillTimes,
    StageAddress,
    StartPrefill,
)

__all__ = [
    "ALL_MESSAGES",
    "AnswerChain",
    "AnyMessage",
    "BlocksCommitted",
    "BlocksLeased",
    "BlocksReplicated",
    "BlocksReserved",
    "BlocksSnapshot",
    "CachedPrefix",
    "Cancel",
    "ChangeRole",
    "CommitBlocks",
    "DecodeCost",
    "DecodeFailed",
    "DecodeLoad",
    "DecodeRefused",
    "DecodeReserved",
    "DropBlocks",
    "Hello",
    "KvstoreAddress",
    "KvstoreLoad",
    "KvstoreRefused",
    "LeaseBlocks",
    "Message",
    "Place",
    "PrefillCost",
    "PrefillDone",
    "PrefillFailed",
    "PrefillLoad",
    "PrefillStopped",
    "PrefillTimes",
    "Produced",
    "ReleaseLease",
    "RenewLease",
    "ReplicateBlocks",
    "ReserveBlocks",
    "ReserveDecode",
    "RevokeBlocks",
    "Role",
    "SnapshotBlocks",
    "Stage",
    "StageAddress",
    "StartDecode",
    "StartPrefill",
    "ToConductor",
    "ToDecode",
    "ToKvstore",
    "ToKvstoreClient",
    "ToPrefill",
    "ToWorker",
    "TokensProduced",
    "Unwelcome",
    "VerifyBlocks",
    "Welcome",
    "WorkerInfo",
]

#: Every member is in one of the unions of `by_receiver`, or more.
AnyMessage = (
    Hello
    | Welcome
    | Unwelcome
    | Cancel
    | ChangeRole
    | ReserveDecode
    | StartDecode
    | DecodeReserved
    | DecodeRefused
    | TokensProduced
    | DecodeFailed
    | DecodeLoad
    | StartPrefill
    | PrefillDone
    | PrefillFailed
    | PrefillStopped
    | PrefillLoad
    | ReserveBlocks
    | CommitBlocks
    | RevokeBlocks
    | LeaseBlocks
    | RenewLease
    | ReleaseLease
    | ReplicateBlocks
    | DropBlocks
    | VerifyBlocks
    | SnapshotBlocks
    | BlocksReserved
    | BlocksCommitted
    | BlocksLeased
    | BlocksReplicated
    | KvstoreRefused
    | BlocksSnapshot
    | KvstoreLoad
)

#: The members of `AnyMessage`, for the schema and the golden bytes.
ALL_MESSAGES: tuple[type[Message], ...] = AnyMessage.__args__
