"""Make small, valid workers, requests and answers for tests, with any field overridden."""

from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import DecodeCost, PrefillCost, PrefillDone, Role, Stage, WorkerInfo
from halfmoon_protocol.regions import Landing, Region
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_scheduling.events import Casualty, Request

#: Layout with the smallest valid blocks: 16 tokens, 64 bytes a token.
LAYOUT = KvLayout(
    model="tiny", n_layers=2, n_kv_heads=1, head_dim=4, dtype="float32", block_size=16
)


def a_worker(
    worker_id: str,
    *,
    generation: int = 1,
    host: str = "",
    n_blocks: int = 64,
    layout: KvLayout | None = LAYOUT,
    prefill_cost: PrefillCost | None = None,
    decode_cost: DecodeCost | None = None,
    home_kvstore: str | None = None,
    max_context: int = 4096,
    model: str = "tiny-chat",
    draining: bool = False,
    replicates: bool = False,
    keeps_answers: bool = False,
    keeps_pages: bool = False,
    skips_held_blocks: bool = False,
    stage: Stage | None = None,
    stage_layers_only: bool = False,
    local_prefill_tokens: int = 0,
    local_prefill_step_s: float = 0.0,
    local_prefill_tbt_s: float = 0.0,
    server: str = "",
    features: tuple[str, ...] | None = None,
) -> WorkerInfo:
    """Return a worker whose role is the first part of its id, as in ``decode-0``."""
    role: Role
    match worker_id.split("-")[0]:
        case "prefill":
            role = "prefill"
        case "decode":
            role = "decode"
        case "kvstore":
            role = "kvstore"
        case other:
            raise ValueError(f"no role {other!r}")
    return WorkerInfo(
        worker_id=WorkerId(worker_id),
        role=role,
        generation=generation,
        host=host or f"host-{worker_id}",
        commands=f"memory://{worker_id}/commands",
        events=f"memory://{worker_id}/events",
        layout=layout,
        model=model,
        max_context=max_context,
        n_blocks=n_blocks,
        prefill_cost=prefill_cost,
        decode_cost=decode_cost,
        home_kvstore=None if home_kvstore is None else WorkerId(home_kvstore),
        draining=draining,
        replicates=replicates,
        keeps_answers=keeps_answers,
        keeps_pages=keeps_pages,
        skips_held_blocks=skips_held_blocks,
        stage=stage,
        stage_layers_only=stage_layers_only,
        local_prefill_tokens=local_prefill_tokens,
        local_prefill_step_s=local_prefill_step_s,
        local_prefill_tbt_s=local_prefill_tbt_s,
        server=server,
        features=features,
    )


def a_request(
    request_id: str = "cmpl-1",
    *,
    n_tokens: int = 40,
    prompt: int = 0,
    max_new_tokens: int = 8,
    open_end: bool = False,
    attempt: int = 1,
    fruitless: int = 0,
    casualties: tuple[Casualty, ...] = (),
    ttft_slo_s: float | None = None,
    tbt_slo_s: float | None = None,
    tenant: str = "",
    priority: int = 0,
    defer_s: float | None = None,
    sampling: Sampling | None = None,
    layout: KvLayout = LAYOUT,
    cache_salt: str = "",
) -> Request:
    """Return a request of `n_tokens` tokens; requests with equal `prompt` share prefixes."""
    token_ids = tuple((prompt * 7919 + i) % 50_000 for i in range(n_tokens))
    hashes = block_hashes(
        token_ids, model=layout.model, salt=cache_salt, block_size=layout.block_size
    )
    return Request(
        request_id=RequestId(request_id),
        token_ids=token_ids,
        n_prompt=n_tokens,
        block_hashes=tuple(hashes),
        sampling=sampling or Sampling(temperature=0.0),
        stopping=Stopping(max_new_tokens=max_new_tokens),
        open_end=open_end,
        attempt=attempt,
        fruitless=fruitless,
        casualties=casualties,
        ttft_slo_s=ttft_slo_s,
        tbt_slo_s=tbt_slo_s,
        tenant=tenant,
        cache_salt=cache_salt,
        priority=priority,
        defer_s=defer_s,
    )


def a_landing(
    decode: str, pages: tuple[int, ...] = tuple(range(64)), *, generation: int = 1
) -> Landing:
    """Return a landing: reserved pages of a decode worker."""
    region = Region(segment=decode, generation=generation, key=bytes(16), length=1 << 20)
    return Landing(region=region, pages=pages, layout=LAYOUT)


def a_prefill_done(
    request_id: str = "cmpl-1",
    *,
    compute_s: float = 0.01,
    fetch_s: float = 0.0,
    kv_transfer_params: str = "",
) -> PrefillDone:
    """Return a prefill's end without cached blocks; its first token is 7, not the last one."""
    return PrefillDone(
        request_id=RequestId(request_id),
        first_token=7,
        finish="",
        n_cached=0,
        queue_s=0.0,
        compute_s=compute_s,
        drain_s=0.0,
        fetch_s=fetch_s,
        kv_transfer_params=kv_transfer_params,
    )
