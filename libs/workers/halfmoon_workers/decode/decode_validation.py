"""Check that a request can run in a batch with others, or can be prefilled in its landing.

The wire's own bounds hold already. This module compares a start with the worker's vocabulary and
with the landing. So a start that would fail a forward pass, and with it other requests, never gets
into one.
"""

from collections.abc import Sequence

from halfmoon_protocol import error_codes
from halfmoon_protocol.messages import ReserveDecode, StartDecode, StartPrefill
from halfmoon_protocol.regions import Region
from halfmoon_scheduling.prefill.prefill_events import PrefillFailure
from halfmoon_workers.prefill.prefill_validation import bias_fault


def reserve_fault(reserve: ReserveDecode, block_size: int) -> str:
    """Return what is wrong with the blocks of a reservation; empty when nothing is."""
    n_hashes, n_full = len(reserve.block_hashes), reserve.n_tokens // block_size
    if n_hashes <= n_full:
        return ""
    return (
        f"block_hashes has {n_hashes} hashes, {reserve.n_tokens} tokens fill {n_full} blocks of"
        f" {block_size}"
    )


def start_fault(start: StartDecode, *, n_landed: int, n_vocab: int, block_size: int) -> str:
    """Return what is wrong with a start; empty when nothing is.

    Stop tokens outside of the vocabulary are no fault: they never match a token.

    Args:
        start: from the connection that reserved the landing.
        n_landed: tokens whose KV landed.
        n_vocab: token ids of the engine are below this.
        block_size: tokens of a page.
    """
    if start.first_token >= n_vocab:
        return f"first_token is {start.first_token}, the vocabulary has {n_vocab} tokens"
    if start.n_prompt > n_landed:
        return f"n_prompt is {start.n_prompt}, {n_landed} tokens were reserved"
    if start.answer_chain is not None:
        n_tail, n_behind = len(start.answer_chain.tail), n_landed % block_size
        if n_tail != n_behind:
            return (
                f"answer_chain.tail has {n_tail} tokens, a prompt of {n_landed} has {n_behind}"
                f" behind its blocks of {block_size}"
            )
    if not start.sampling.needs_history:
        return bias_fault(start.sampling, n_vocab)
    if len(start.history) != n_landed:
        return f"history has {len(start.history)} tokens, {n_landed} were reserved"
    if (worst := max(start.history)) >= n_vocab:
        return f"history has token {worst}, the vocabulary has {n_vocab} tokens"
    return bias_fault(start.sampling, n_vocab)


def local_prefill_fault(
    start: StartPrefill,
    *,
    region: Region,
    pages: Sequence[int],
    n_landed: int,
    n_held_blocks: int,
    block_size: int,
    max_tokens: int,
) -> PrefillFailure | None:
    """Return why a prompt is not prefilled in its landing; None: it can be.

    A prompt over the worker's limit may fit another worker, so another try may succeed. The other
    faults are the conductor's and stay.

    Args:
        start: from the connection that reserved the landing; valid for any worker.
        region: as the landing names it.
        pages: of the landing.
        n_landed: tokens that the landing was reserved for.
        n_held_blocks: blocks at its beginning that were there already.
        block_size: tokens of a page.
        max_tokens: limit of the uncached rest, from the settings.
    """
    n_tokens = len(start.token_ids)
    if start.stages:
        reason = f"stages names {len(start.stages)} workers: a decode worker is in no group"
        return PrefillFailure(reason, retryable=False, code=error_codes.INVALID)
    if start.landing.region != region or start.landing.pages != tuple(pages):
        reason = "landing is not the one that was reserved here for this request"
        return PrefillFailure(reason, retryable=False, code=error_codes.INVALID)
    if n_tokens != n_landed:
        reason = f"token_ids has {n_tokens} tokens, {n_landed} were reserved"
        return PrefillFailure(reason, retryable=False, code=error_codes.INVALID)
    if start.n_held_blocks != n_held_blocks:
        reason = f"n_held_blocks is {start.n_held_blocks}, the landing has {n_held_blocks}"
        return PrefillFailure(reason, retryable=False, code=error_codes.INVALID)
    if n_held_blocks and start.sampling.prompt_logprobs is not None:
        reason = f"prompt_logprobs computes all blocks, {n_held_blocks} of them are of others"
        return PrefillFailure(reason, retryable=False, code=error_codes.INVALID)
    n_blocks = max(n_held_blocks, 0 if start.cached is None else start.cached.n_blocks)
    rest = n_tokens - min(n_blocks, (n_tokens - 1) // block_size) * block_size
    if rest > max_tokens:
        reason = (
            f"{rest} tokens are not cached, local_prefill_tokens is {max_tokens}: use a prefill"
            " worker, or raise the setting"
        )
        return PrefillFailure(reason, retryable=True, code=error_codes.OVER_LIMIT)
    return None
