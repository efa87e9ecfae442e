"""Check that the request of a `StartDecode` can run in a batch with others.

The wire's own bounds hold already. This module compares a start with the worker's vocabulary and
with the landing. So a start that would fail a forward pass, and with it other requests, never gets
into one.
"""

from collections.abc import Iterable

from halfmoon_protocol.messages import StartDecode
from halfmoon_protocol.sampling import Sampling


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


def bias_fault(sampling: Sampling, n_vocab: int) -> str:
    """Return what is wrong with a request's logit biases; empty when nothing is."""
    biased: Iterable[int] = (token for token, _ in sampling.logit_bias)
    if (worst := max(biased, default=0)) >= n_vocab:
        return f"logit_bias has token {worst}, the vocabulary has {n_vocab} tokens"
    return ""
