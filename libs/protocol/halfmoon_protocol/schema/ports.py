"""List the sockets of workers: the messages that each takes, how it answers, what it publishes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halfmoon_protocol.messages import (
    BlocksCommitted,
    BlocksLeased,
    BlocksReplicated,
    BlocksReserved,
    BlocksSnapshot,
    Cancel,
    ChunkSent,
    CommitBlocks,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    Hello,
    KvstoreLoad,
    KvstoreRefused,
    LeaseBlocks,
    LeaseRenewed,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    RenewLease,
    ReplicateBlocks,
    ReserveBlocks,
    ReserveDecode,
    ShareDone,
    ShareEnded,
    ShareKept,
    ShareProgress,
    ShareReady,
    SlotFreed,
    SnapshotBlocks,
    StartDecode,
    StartPrefill,
    StartShare,
    StopShare,
    ToDecode,
    ToFurtherStage,
    TokensProduced,
    ToKvstore,
    ToPrefill,
    Welcome,
    WrongVersion,
)

Messages = tuple[type[Message], ...]


@dataclass(frozen=True)
class CommandPort:
    """The ROUTER of one kind of worker, as one kind of caller uses it."""

    #: What the worker is to this caller.
    name: str
    #: Records of workers with this role state the endpoint.
    role: str
    callers: str
    #: Union of the messages that callers send.
    takes: Any
    #: A message that is not listed is not answered.
    answers: Mapping[type[Message], Messages]
    #: Messages that the worker sends without a question.
    sends: Messages = ()

    @property
    def taken(self) -> Messages:
        """The messages that callers send."""
        messages: Messages = self.takes.__args__
        return messages

    @property
    def sent(self) -> Messages:
        """The messages that the worker sends, each once."""
        answers = (answer for each in self.answers.values() for answer in each)
        return tuple(dict.fromkeys([*answers, *self.sends]))


COMMAND_PORTS = (
    CommandPort(
        name="prefill",
        role="prefill",
        callers="Conductors",
        takes=ToPrefill,
        answers={
            Hello: (Welcome, WrongVersion),
            StartPrefill: (PrefillDone, PrefillFailed),
            Cancel: (PrefillStopped,),
        },
        sends=(Welcome, WrongVersion),
    ),
    CommandPort(
        name="stage",
        role="prefill",
        callers="Prefill workers that are stage 0 of a group",
        takes=ToFurtherStage,
        answers={
            StartShare: (ShareReady, ShareDone, ShareKept, ShareEnded),
            StopShare: (ShareEnded,),
        },
        sends=(ChunkSent, SlotFreed, ShareProgress),
    ),
    CommandPort(
        name="decode",
        role="decode",
        callers="Conductors",
        takes=ToDecode,
        answers={
            Hello: (Welcome, WrongVersion),
            ReserveDecode: (DecodeReserved, DecodeRefused),
            StartDecode: (TokensProduced, DecodeFailed),
            StartPrefill: (PrefillDone, PrefillFailed),
        },
        sends=(Welcome, WrongVersion),
    ),
    CommandPort(
        name="kvstore",
        role="kvstore",
        callers="Conductors, prefill workers, decode workers that put, other kvstores, and tools",
        takes=ToKvstore,
        answers={
            Hello: (Welcome, WrongVersion),
            ReserveBlocks: (BlocksReserved, KvstoreRefused),
            CommitBlocks: (BlocksCommitted, KvstoreRefused),
            LeaseBlocks: (BlocksLeased, KvstoreRefused),
            RenewLease: (LeaseRenewed, KvstoreRefused),
            ReplicateBlocks: (BlocksReplicated, KvstoreRefused),
            SnapshotBlocks: (BlocksSnapshot,),
        },
        sends=(Welcome, WrongVersion),
    ),
)


@dataclass(frozen=True)
class EventPort:
    """The PUB of one kind of worker."""

    role: str
    #: The message under the topic ``load``.
    load: type[Message]
    #: True if KV events are published beside it.
    has_kv_events: bool = field(default=False)


EVENT_PORTS = (
    EventPort("prefill", PrefillLoad),
    EventPort("decode", DecodeLoad),
    EventPort("kvstore", KvstoreLoad, has_kv_events=True),
)
