"""Define a worker's record, and the messages by which a conductor and a worker connect."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from halfmoon_protocol.bounds import (
    MAX_STAGES,
    Address,
    Blocks,
    ConductorName,
    Count,
    ErrorCode,
    FeatureNames,
    Index,
    KeyId,
    Layers,
    Name,
    PositiveTokens,
    Reason,
    RequestName,
    Seconds,
    SecondsPerRequest,
    SecondsPerToken,
    SecondsPerTokenSquared,
    Tokens,
    Version,
    WorkerName,
    unit,
)
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages.base import Message

Role = Literal["prefill", "decode", "kvstore"]


class PrefillCost(msgspec.Struct, frozen=True):
    """Seconds to prefill n tokens of which p are cached: c0 + c1·(n-p) + c2·(n²-p²)."""

    #: Of each prefill.
    c0_s: Seconds = 0.01
    #: Of each token that is not cached.
    c1_s: SecondsPerToken = 1e-4
    #: Of each pair of tokens in n² - p²: attention to the tokens before.
    c2_s: SecondsPerTokenSquared = 0.0


class DecodeCost(msgspec.Struct, frozen=True):
    """Seconds of one step: d0 + d1·(requests in it) + d2·(context tokens in it)."""

    #: Of each step.
    d0_s: Seconds = 0.01
    #: Of each request in it.
    d1_s: SecondsPerRequest = 1e-3
    #: Of each token that its requests attend to.
    d2_s: SecondsPerToken = 0.0


class Stage(msgspec.Struct, frozen=True):
    """One stage of a group of prefill workers that compute long prompts together.

    The layers are cut into `n_stages` runs, the last of which may be longer than others (see
    `halfmoon_protocol.stage_layers`). A prompt is cut into chunks, and while one stage computes a
    chunk, the stage before it computes the next one.
    """

    #: Name of the group; it can work when all its stages are there.
    group: Name
    #: The stage of this worker, from 0. Stage 0 receives the prompt, and answers.
    index: Annotated[int, Meta(ge=0, lt=MAX_STAGES), unit("index")]
    #: Stages of the group.
    n_stages: Annotated[int, Meta(ge=1, le=MAX_STAGES), unit("stages")]
    #: Tokens of a chunk at the most.
    chunk_tokens: PositiveTokens = 2048
    #: Seconds in which a chunk's activations are sent from one stage to the next.
    hop_s: Seconds = 0.0
    #: The first layer of this stage, from 0. A group works if the runs of all its stages join up.
    first_layer: Index = 0
    #: Layers of this stage; 0: runs of equal length, if no member says its layers.
    n_layers: Layers = 0


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker, in its own words: its record in the metadata server, and its welcome."""

    #: Its name: the key of its record.
    worker_id: WorkerName
    #: What it does now.
    role: Role
    #: Counts the starts of this worker: a restart has a higher one.
    generation: Count
    #: The machine it runs on: workers with equal hosts may share memory.
    host: Name
    #: ZeroMQ endpoint of its ROUTER, for commands.
    commands: Address
    #: ZeroMQ endpoint of its PUB, for events.
    events: Address
    #: The layout of its KV bytes. A kvstore that has not stored anything yet has none.
    layout: KvLayout | None = None
    #: Name of the model it serves, as clients request it.
    model: Name = ""
    #: Tokens of the longest context that the model allows.
    max_context: Tokens = 0
    #: Blocks that its memory holds (pages of a pool, slots of a store).
    n_blocks: Blocks = 0
    #: Seconds that it takes for a prefill; none: the defaults of `PrefillCost`.
    prefill_cost: PrefillCost | None = None
    #: Seconds that it takes for a step; none: the defaults of `DecodeCost`.
    decode_cost: DecodeCost | None = None
    #: The kvstore that this prefill worker prefers, by its settings.
    home_kvstore: WorkerName | None = None
    #: True when it finishes its requests and takes no new ones.
    draining: bool = False
    #: Roles that it takes on after a `ChangeRole`, its present one among them; empty: it keeps
    #: its role.
    roles: Annotated[tuple[Role, ...], Meta(max_length=16)] = ()
    #: True when this kvstore handles `ReplicateBlocks` and `DropBlocks`.
    replicates: bool = False
    #: True when this decode worker handles `StartDecode.answer_chain`.
    keeps_answers: bool = False
    #: True when this decode worker handles `ReserveDecode.block_hashes`.
    keeps_pages: bool = False
    #: True when this worker handles `StartPrefill.n_held_blocks`, and that of `StartShare`.
    skips_held_blocks: bool = False
    #: The stage of this prefill worker in a group, besides whole prompts; None: it is in no group.
    stage: Stage | None = None
    #: True when it has the layers of its stage alone: it computes prompts of its group only.
    stage_layers_only: bool = False
    #: Longest uncached rest of a prompt, in tokens, that this decode worker computes beside
    #: its steps when it gets `StartPrefill` for a landing of its own; 0: it can't. If it can, its
    #: record states a `prefill_cost`.
    local_prefill_tokens: Tokens = 0
    #: It computes such a rest in parts: the most seconds of a step and of the part computed with
    #: it; 0: the rest is computed in one step.
    local_prefill_step_s: Seconds = 0.0
    #: Mean seconds between tokens that its parts leave to running requests; 0: it promises none.
    local_prefill_tbt_s: Seconds = 0.0
    #: URL of this worker's HTTP interface for operators; empty: it has none.
    http: Address = ""
    #: What computes its model, for operators: a library and its instruction set; empty: not said.
    computes_with: Name = ""
    #: Workers with the same non-empty name are one server: what one of them holds is used by
    #: that server alone. A prompt that is prefilled there is decoded there, and no other worker
    #: reads the blocks of its kvstore or stores blocks in it.
    server: Name = ""
    #: Id of the cluster key that its sockets serve with, of those that it has; empty: not said.
    key_id: KeyId = ""
    #: The lowest version of the protocol that it speaks.
    min_version: Version = 1
    #: The highest version of the protocol that it speaks.
    max_version: Version = 1
    #: What it can do of what requests may ask for (`halfmoon_protocol.features`). None: all that
    #: workers of the first version could.
    features: FeatureNames | None = None


class Hello(Message, frozen=True, tag="hello"):
    """The first message on a connection, answered by `Welcome`. What was asked for on an earlier
    connection of this name ends when that connection is down; while it is up, both are served."""

    #: Name of the sender. Connections with one name are one conductor's.
    conductor_id: ConductorName
    #: Counts this conductor's connections to this worker.
    session: Count
    #: The lowest version of the protocol that the conductor speaks.
    min_version: Version = 1
    #: The highest version of the protocol that the conductor speaks.
    max_version: Version = 1


class Welcome(Message, frozen=True, tag="welcome"):
    """The answer to `Hello`; sent again whenever the worker's own record changes."""

    #: The worker's record, as in the metadata server.
    worker: WorkerInfo


class Unwelcome(Message, frozen=True, tag="unwelcome"):
    """A conductor will not use this worker. The worker logs the reason; a prefill or decode worker
    stops when no connected conductor is left that uses it."""

    #: Why, for the worker's log.
    reason: Reason
    code: ErrorCode = ""


class WrongVersion(Message, frozen=True, tag="wrong_version"):
    """A frame, or a hello, of other protocol versions came; nothing was done about it.

    Each such hello is answered; such frames at most once a second on a connection. Frames that were
    not read are lost.
    """

    #: The first byte of that frame, or the highest version in that hello.
    got: Annotated[int, Meta(ge=0, le=255), unit("version")]
    #: The lowest version of the protocol that the worker speaks.
    min_version: Version
    #: The highest version of the protocol that the worker speaks.
    max_version: Version


class ChangeRole(Message, frozen=True, tag="change_role"):
    """Finish what you have, leave, and come back in this role. Only for workers whose record
    lists it in `roles`. Nothing is answered: the worker's record says that it is draining, ends,
    and is there again with a higher generation and the new role.
    """

    #: The role to come back in.
    role: Role
    #: Why, for the worker's log.
    reason: Reason


class Cancel(Message, frozen=True, tag="cancel"):
    """Forget this request and free all it holds. Unknown ids are fine.

    A prefill worker answers `PrefillStopped`; a decode worker answers nothing.
    """

    request_id: RequestName
    #: For decode: a worker that writes the landing is lost and could not be stopped, so the pages
    #: are kept aside for a while before another request gets them.
    landing_in_doubt: bool = False
