"""Define every message on a Halfmoon socket.

A module has the messages between two kinds of services; `by_receiver` lists them by receiver.
"""

from halfmoon_protocol.messages.base import Message
from halfmoon_protocol.messages.by_receiver import (
    ToConductor,
    ToDecode,
    ToFirstStage,
    ToFurtherStage,
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
    LeaseRenewed,
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
    WrongVersion,
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
from halfmoon_protocol.messages.stages import (
    ActivationSlots,
    BlockPlaces,
    ChunkSent,
    ShareDone,
    ShareEnded,
    ShareKept,
    ShareProgress,
    ShareReady,
    SlotFreed,
    StartShare,
    StopShare,
)

__all__ = [
    "ALL_MESSAGES",
    "ActivationSlots",
    "AnswerChain",
    "AnyMessage",
    "BlockPlaces",
    "BlocksCommitted",
    "BlocksLeased",
    "BlocksReplicated",
    "BlocksReserved",
    "BlocksSnapshot",
    "CachedPrefix",
    "Cancel",
    "ChangeRole",
    "ChunkSent",
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
    "LeaseRenewed",
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
    "ShareDone",
    "ShareEnded",
    "ShareKept",
    "ShareProgress",
    "ShareReady",
    "SlotFreed",
    "SnapshotBlocks",
    "Stage",
    "StageAddress",
    "StartDecode",
    "StartPrefill",
    "StartShare",
    "StopShare",
    "ToConductor",
    "ToDecode",
    "ToFirstStage",
    "ToFurtherStage",
    "ToKvstore",
    "ToKvstoreClient",
    "ToPrefill",
    "ToWorker",
    "TokensProduced",
    "Unwelcome",
    "VerifyBlocks",
    "Welcome",
    "WorkerInfo",
    "WrongVersion",
]

#: Every member is in one of the unions of `by_receiver`, or more.
AnyMessage = (
    Hello
    | Welcome
    | Unwelcome
    | WrongVersion
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
    | StartShare
    | StopShare
    | ChunkSent
    | SlotFreed
    | ShareReady
    | ShareProgress
    | ShareDone
    | ShareKept
    | ShareEnded
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
    | LeaseRenewed
    | BlocksReplicated
    | KvstoreRefused
    | BlocksSnapshot
    | KvstoreLoad
)

#: The members of `AnyMessage`, for the schema and the golden bytes.
ALL_MESSAGES: tuple[type[Message], ...] = AnyMessage.__args__
