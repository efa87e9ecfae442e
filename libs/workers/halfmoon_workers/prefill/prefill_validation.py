"""Check a `StartPrefill` before its request shares forward passes with others.

The wire's own bounds hold already. Here a start is compared with what this worker knows: the
model's vocabulary, context and layout. What would fail a forward pass, and with it the requests
of others, is found before it is in one.
"""

from halfmoon_engine.interface import Engine
from halfmoon_protocol import error_codes
from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import StartPrefill
from halfmoon_protocol.sampling import Sampling
from halfmoon_scheduling.prefill.prefill_events import PrefillFailure


def start_failure(
    start: StartPrefill, engine: Engine, worker_id: WorkerId
) -> PrefillFailure | None:
    """Return why a worker can never do a start; None when it can."""
    layout = engine.layout
    try:
        layout.require_same(start.landing.layout, worker_id, start.landing.region.segment)
    except LayoutMismatch as error:
        return PrefillFailure(str(error), retryable=False, code=error_codes.LAYOUT_MISMATCH)
    if fault := request_fault(start, n_vocab=engine.n_vocab, max_context=engine.max_context):
        too_long = len(start.token_ids) > engine.max_context
        code = error_codes.TOO_LONG if too_long else error_codes.INVALID
        return PrefillFailure(fault, retryable=False, invalid=True, code=code)
    if fault := start_fault(start, layout):
        return PrefillFailure(fault, retryable=False, code=error_codes.INVALID)
    return None


def request_fault(start: StartPrefill, *, n_vocab: int, max_context: int) -> str:
    """Say what is wrong with what the client asked for; empty when nothing is.

    Stop tokens outside of the vocabulary are no fault: they are compared, and never come.

    Args:
        start: of any request.
        n_vocab: token ids of the engine are below this.
        max_context: tokens of the longest sequence that the model allows.
    """
    n_tokens = len(start.token_ids)
    if not n_tokens:
        return "token_ids is empty: at least one token is computed"
    if n_tokens > max_context:
        return f"token_ids has {n_tokens} tokens, max_context is {max_context}"
    if (worst := max(start.token_ids)) >= n_vocab:
        return f"token_ids has token {worst}, the vocabulary has {n_vocab} tokens"
    return bias_fault(start.sampling, n_vocab)


def bias_fault(sampling: Sampling, n_vocab: int) -> str:
    """Say what is wrong with a request's logit biases; empty when nothing is."""
    if (worst := max((token for token, _ in sampling.logit_bias), default=0)) >= n_vocab:
        return f"logit_bias has token {worst}, the vocabulary has {n_vocab} tokens"
    return ""


def start_fault(start: StartPrefill, layout: KvLayout) -> str:
    """Say what is wrong with a conductor's part of a start; empty when nothing is.

    Args:
        start: its landing's layout is `layout`.
        layout: of this worker's pool.
    """
    n_tokens = len(start.token_ids)
    if start.n_prompt > n_tokens:
        return f"n_prompt is {start.n_prompt}, token_ids has {n_tokens} tokens"
    if len(start.block_hashes) > n_tokens // layout.block_size:
        return (
            f"block_hashes has {len(start.block_hashes)} hashes, {n_tokens} tokens fill "
            f"{n_tokens // layout.block_size} blocks of {layout.block_size}"
        )
    if start.n_held_blocks * layout.block_size >= n_tokens:
        return (
            f"n_held_blocks is {start.n_held_blocks}: at least the last block of {n_tokens} tokens"
            " is to land"
        )
    return _landing_fault(start, layout)


def _landing_fault(start: StartPrefill, layout: KvLayout) -> str:
    landing, needed = start.landing, layout.blocks_for(len(start.token_ids))
    pages = landing.pages[:needed]
    if len(pages) < needed:
        return f"{len(start.token_ids)} tokens need {needed} pages, the landing has {len(pages)}"
    if len(set(pages)) < needed:
        return f"the landing names a page twice: {needed} pages, {len(set(pages))} different ones"
    end = (max(pages) + 1) * layout.block_bytes
    if end > landing.region.length:
        return (
            f"the landing's page {max(pages)} ends at byte {end}, its region has "
            f"{landing.region.length}"
        )
    return ""
