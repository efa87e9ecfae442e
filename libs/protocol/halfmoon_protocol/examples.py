"""Give one example of every message, for the golden bytes and for tests."""

import msgspec

from halfmoon_protocol.ids import BlockHash, ConductorId, RequestId, Ticket, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages import (
    ActivationSlots,
    AnswerChain,
    BlockPlaces,
    BlocksCommitted,
    BlocksLeased,
    BlocksReplicated,
    BlocksReserved,
    BlocksSnapshot,
    CachedPrefix,
    Cancel,
    ChangeRole,
    ChunkSent,
    CommitBlocks,
    DecodeCost,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    DropBlocks,
    Hello,
    KvstoreAddress,
    KvstoreLoad,
    KvstoreRefused,
    LeaseBlocks,
    LeaseRenewed,
    Message,
    Place,
    PrefillCost,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    PrefillTimes,
    Produced,
    ReleaseLease,
    RenewLease,
    ReplicateBlocks,
    ReserveBlocks,
    ReserveDecode,
    RevokeBlocks,
    ShareDone,
    ShareEnded,
    ShareKept,
    ShareProgress,
    ShareReady,
    SlotFreed,
    SnapshotBlocks,
    Stage,
    StageAddress,
    StartDecode,
    StartPrefill,
    StartShare,
    StopShare,
    TokensProduced,
    Unwelcome,
    VerifyBlocks,
    Welcome,
    WorkerInfo,
    WrongVersion,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_protocol.trace_context import TraceContext

REQUEST = RequestId("cmpl-7f3a")
TICKET = Ticket("prefill-0/17")
LAYOUT = KvLayout(
    model="sha256:0f1e2d", n_layers=2, n_kv_heads=2, head_dim=16, dtype="float32", block_size=16
)
REGION = Region("decode-0", 3, bytes(range(16)), 1 << 20)
KVSTORE_REGION = Region("kvstore-0", 2, bytes(range(16)), 1 << 20)
LANDING = Landing(REGION, (4, 7), LAYOUT)
HASHES = (BlockHash(bytes(range(16))), BlockHash(bytes(range(16, 32))))
SCORE = TokenScore(-0.25, 1, ((302, -0.25), (7, -1.75)))
SCORED_SAMPLING = Sampling(logit_bias=((7, -4.0),), logprobs=2, prompt_logprobs=0)
TRACE = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=1")
KV_TRANSFER_PARAMS = '{"remote_block_ids":[3,4]}'
STOPPING = Stopping(max_new_tokens=32, stop_token_ids=(2,))
SAMPLING = Sampling(temperature=0.7, top_p=0.9, seed=11)
#: Of the cluster key 0123456789abcdef0123456789abcdef.
KEY_ID = "ac09f77b7f8f7373"
KVSTORE = KvstoreAddress(WorkerId("kvstore-0"), 2, "tcp://127.0.0.1:7301", KEY_ID)
REPLICA = KvstoreAddress(WorkerId("kvstore-1"), 1, "tcp://127.0.0.1:7303")
WORKER = WorkerInfo(
    worker_id=WorkerId("prefill-0"),
    role="prefill",
    generation=2,
    host="host-a",
    commands="tcp://127.0.0.1:7101",
    events="tcp://127.0.0.1:7102",
    layout=LAYOUT,
    model="demo",
    max_context=4096,
    n_blocks=256,
    prefill_cost=PrefillCost(0.01, 0.0001, 0.00000001),
    decode_cost=DecodeCost(0.01, 0.001, 0.000001),
    home_kvstore=WorkerId("kvstore-0"),
    roles=("prefill", "decode"),
    stage=Stage("group-0", 0, 2, chunk_tokens=512, hop_s=0.002),
    key_id=KEY_ID,
    max_version=2,
    features=("sampling", "logprobs"),
)
SLOTS = ActivationSlots(Region("prefill-2", 1, bytes(range(16)), 1 << 20), (0, 65536), 65536, 128)

EXAMPLES: tuple[Message, ...] = (
    Hello(conductor_id=ConductorId("conductor-0"), session=1, max_version=2),
    Welcome(worker=WORKER),
    Unwelcome(
        reason="KV layouts differ: block_size is 16 at the cluster, 32 at decode-1",
        code="layout_mismatch",
    ),
    WrongVersion(got=9, min_version=1, max_version=2),
    Cancel(request_id=REQUEST, landing_in_doubt=True),
    ChangeRole(role="decode", reason="decode has had a load of 1.30, the other side of 0.20"),
    ReserveDecode(
        request_id=REQUEST,
        n_tokens=20,
        stopping=STOPPING,
        trace=TRACE,
        block_hashes=HASHES[:1],
    ),
    StartDecode(
        request_id=REQUEST,
        first_token=301,
        sampling=SAMPLING,
        stopping=STOPPING,
        n_prompt=20,
        history=(1, 5),
        answer_chain=AnswerChain(KVSTORE, HASHES[0], (7, 9, 11, 13), tenant="lab"),
    ),
    DecodeReserved(request_id=REQUEST, landing=LANDING, expires_s=120.0, n_held_blocks=1),
    DecodeRefused(request_id=REQUEST, reason="2 pages wanted, 1 of 64 free", retryable=True),
    TokensProduced(
        step=9, produced=(Produced(REQUEST, 302), Produced(RequestId("cmpl-90b1~2"), 2, "stop"))
    ),
    DecodeFailed(
        request_id=REQUEST, reason="preempted: no page is free", retryable=True, code="preempted"
    ),
    DecodeLoad(
        n_running=3, n_reserved=1, context_tokens=1200, free_pages=40, n_pages=64, step_s=0.012
    ),
    StartPrefill(
        request_id=REQUEST,
        token_ids=(1, 5, 300),
        n_prompt=3,
        block_hashes=HASHES,
        landing=LANDING,
        landing_expires_s=115.0,
        sampling=SAMPLING,
        stopping=STOPPING,
        cached=CachedPrefix(KVSTORE, 1, (REPLICA,)),
        store_in=KVSTORE,
        priority=2,
        deadline_s=2.5,
        stages=(StageAddress(WorkerId("prefill-1"), 1, "tcp://127.0.0.1:7111"),),
        trace=TRACE,
        cache_salt="tenant-a",
        n_held_blocks=1,
    ),
    PrefillDone(
        request_id=REQUEST,
        first_token=301,
        finish="",
        n_cached=16,
        queue_s=0.01,
        compute_s=0.2,
        drain_s=0.003,
        fetched_bytes=8192,
        fetch_s=0.002,
    ),
    PrefillFailed(
        request_id=REQUEST,
        reason="writing to decode-0 was lost",
        retryable=True,
        culprit=WorkerId("decode-0"),
    ),
    PrefillStopped(request_id=REQUEST, landing_in_doubt=True),
    PrefillLoad(n_queued=2, queued_tokens=3000, free_pages=100, n_pages=256),
    StartShare(
        request_id=REQUEST,
        stage=Stage("group-0", 1, 3, chunk_tokens=512),
        layout=LAYOUT,
        token_ids=(1, 5, 300),
        n_prompt=3,
        landing=LANDING,
        landing_expires_s=115.0,
        sampling=SAMPLING,
        cached=BlockPlaces(KVSTORE_REGION, (0,), (4096,)),
        room=BlockPlaces(KVSTORE_REGION, (1,), (8192,)),
        next_slots=SLOTS,
        priority=2,
        deadline_s=4.0,
        trace=TRACE,
    ),
    StopShare(request_id=REQUEST),
    ChunkSent(request_id=REQUEST, stage=1, start=512, stop=1024, slot=1),
    SlotFreed(request_id=REQUEST, stage=1, slot=1),
    ShareReady(request_id=REQUEST, slots=SLOTS),
    ShareProgress(request_id=REQUEST, n_tokens=1024),
    ShareDone(
        request_id=REQUEST, first_token=301, score=SCORE, prompt_scores=(SCORE,), compute_s=0.2
    ),
    ShareKept(request_id=REQUEST, is_written=True),
    ShareEnded(
        request_id=REQUEST,
        reason="KV did not reach decode-0: no path works",
        retryable=True,
        culprit=WorkerId("decode-0"),
    ),
    ReserveBlocks(
        ticket=TICKET,
        layout=LAYOUT,
        hashes=HASHES,
        parent=BlockHash(b"\xff" * 16),
        token_ids=tuple(range(32)),
    ),
    CommitBlocks(ticket=TICKET, checksums=(0x0123456789ABC, 7)),
    RevokeBlocks(ticket=TICKET),
    LeaseBlocks(ticket=TICKET, layout=LAYOUT, hashes=HASHES, trace=TRACE),
    RenewLease(ticket=TICKET),
    ReleaseLease(ticket=TICKET),
    ReplicateBlocks(
        ticket=TICKET,
        source=KVSTORE,
        layout=LAYOUT,
        hashes=HASHES[1:],
        parent=HASHES[0],
        token_ids=tuple(range(16)),
    ),
    DropBlocks(hashes=HASHES),
    VerifyBlocks(hashes=HASHES),
    SnapshotBlocks(),
    SnapshotBlocks(page=8192),
    BlocksReserved(
        ticket=TICKET,
        region=KVSTORE_REGION,
        places=(Place(HASHES[0], 0), Place(HASHES[1], 8192)),
        expires_s=30.0,
    ),
    BlocksCommitted(ticket=TICKET),
    BlocksLeased(
        ticket=TICKET,
        region=KVSTORE_REGION,
        places=(Place(HASHES[0], 0, 0xFEED),),
        expires_s=10.0,
        n_from_disk=1,
    ),
    LeaseRenewed(ticket=TICKET, expires_s=10.0),
    BlocksReplicated(ticket=TICKET, n_blocks=1),
    KvstoreRefused(
        ticket=TICKET, reason="all 64 blocks are leased", retry_after_s=10.0, code="no_room"
    ),
    BlocksSnapshot(sequence=41, hashes=HASHES),
    BlocksSnapshot(sequence=41, hashes=HASHES, n_before=8192, n_after=3),
    KvstoreLoad(
        n_stored=50,
        n_reserved=2,
        n_leased=3,
        n_blocks=64,
        sequence=41,
        n_disk_stored=70,
        n_disk_blocks=256,
        n_found_in_memory=900,
        n_found_on_disk=80,
        n_missing=20,
    ),
    # With log probabilities.
    StartDecode(
        request_id=REQUEST,
        first_token=301,
        sampling=SCORED_SAMPLING,
        stopping=STOPPING,
        n_prompt=20,
    ),
    TokensProduced(step=10, produced=(Produced(REQUEST, 302),), scores=((REQUEST, SCORE),)),
    PrefillDone(
        request_id=REQUEST,
        first_token=302,
        finish="",
        n_cached=0,
        queue_s=0.01,
        compute_s=0.2,
        drain_s=0.003,
        score=SCORE,
        prompt_scores=(TokenScore(-3.5, 9), TokenScore(-0.125, 1)),
        times=PrefillTimes(queue_s=0.011, fetch_s=0.001, compute_s=0.2, transfer_s=0.003),
    ),
    # Of servers, whose KV no other worker reads.
    Welcome(worker=msgspec.structs.replace(WORKER, server="server-0", stage=None, roles=())),
    PrefillDone(
        request_id=REQUEST,
        first_token=301,
        finish="",
        n_cached=0,
        queue_s=0.01,
        compute_s=0.2,
        drain_s=0.0,
        kv_transfer_params=KV_TRANSFER_PARAMS,
    ),
    StartDecode(
        request_id=REQUEST,
        first_token=301,
        sampling=SAMPLING,
        stopping=STOPPING,
        n_prompt=2,
        history=(1, 5),
        kv_transfer_params=KV_TRANSFER_PARAMS,
        cache_salt="tenant-a",
    ),
    DecodeFailed(
        request_id=REQUEST,
        reason="http://127.0.0.1:8001 ended the stream in silence",
        retryable=True,
        culprit=WorkerId("server-0-decode"),
    ),
)

#: Integers that not every language reads from JSON: these are golden in hexadecimal alone.
LARGEST_INTEGERS: tuple[Message, ...] = (
    CommitBlocks(ticket=TICKET, checksums=(2**64 - 1, 2**63, 2**53)),
    BlocksLeased(
        ticket=TICKET,
        region=KVSTORE_REGION,
        places=(Place(HASHES[0], 0, 2**64 - 1),),
        expires_s=10.0,
    ),
    BlocksSnapshot(sequence=2**62, hashes=HASHES),
    StartDecode(
        request_id=REQUEST,
        first_token=301,
        sampling=Sampling(seed=2**63 - 1),
        n_prompt=20,
    ),
)
