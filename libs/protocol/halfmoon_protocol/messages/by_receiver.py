"""List the messages that each kind of service receives.

A handler first drops what is not in its union: a newer or a broken peer may send anything. It then
matches over the union and ends in `assert_never`, so that mypy names each handler that lacks a
message. A message may be in several unions.
"""

from halfmoon_protocol.messages.decode import (
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
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
    Hello,
    Unwelcome,
    Welcome,
    WrongVersion,
)
from halfmoon_protocol.messages.prefill import (
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    StartPrefill,
)
from halfmoon_protocol.messages.stages import (
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

#: Answers and load reports of all workers.
ToConductor = (
    Welcome
    | WrongVersion
    | DecodeReserved
    | DecodeRefused
    | TokensProduced
    | DecodeFailed
    | DecodeLoad
    | PrefillDone
    | PrefillFailed
    | PrefillStopped
    | PrefillLoad
    | BlocksReplicated
    | KvstoreRefused
    | BlocksSnapshot
    | KvstoreLoad
)

ToPrefill = StartPrefill | Cancel | Hello | Unwelcome | ChangeRole

#: Commands of stage 0 of a group to a prefill worker that computes a further stage.
ToFurtherStage = StartShare | StopShare | ChunkSent | SlotFreed

#: Answers of a further stage to stage 0.
ToFirstStage = (
    ShareReady | ChunkSent | SlotFreed | ShareProgress | ShareDone | ShareKept | ShareEnded
)

#: `StartPrefill` is only for a decode worker whose record states `local_prefill_tokens`.
ToDecode = ReserveDecode | StartDecode | StartPrefill | Cancel | Hello | Unwelcome | ChangeRole

#: Commands of conductors, prefill workers and other kvstores.
ToKvstore = (
    ReserveBlocks
    | CommitBlocks
    | RevokeBlocks
    | LeaseBlocks
    | RenewLease
    | ReleaseLease
    | ReplicateBlocks
    | DropBlocks
    | VerifyBlocks
    | SnapshotBlocks
    | Cancel
    | Hello
    | Unwelcome
)

ToWorker = ToPrefill | ToFurtherStage | ToDecode | ToKvstore

#: Answers to a prefill worker, another kvstore or a tool. Each has the ticket of its question.
ToKvstoreClient = (
    BlocksReserved
    | BlocksCommitted
    | BlocksLeased
    | LeaseRenewed
    | BlocksReplicated
    | KvstoreRefused
    | BlocksSnapshot
)
