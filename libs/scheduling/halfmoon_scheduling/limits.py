"""What is too long for whom: limits that no waiting removes."""

from collections.abc import Sequence

from halfmoon_protocol.messages import WorkerInfo
from halfmoon_scheduling.events import Request


class TooLong(Exception):
    """No worker can ever take the request; the text names the number and the limit."""


def able_workers(
    request: Request,
    prefills: Sequence[WorkerInfo],
    decodes: Sequence[WorkerInfo],
    block_size: int,
) -> tuple[list[WorkerInfo], list[WorkerInfo]]:
    """Those prefill and decode workers that could take the request if they were idle.

    A decode worker must hold prompt and output, save the last token's KV, which nothing
    needs. A limit of 0 (a prefill worker's pages, a model's context) is no limit.

    Args:
        request: with its whole prompt and the tokens it may add.
        prefills: prefill workers, at least one.
        decodes: decode workers, at least one.
        block_size: tokens per page.

    Raises:
        TooLong: one of the two lists would be empty.
    """
    n_tokens, n_new = len(request.token_ids), request.stopping.max_new_tokens
    within = [
        info
        for info in (*prefills, *decodes)
        if info.max_context == 0 or n_tokens + n_new <= info.max_context
    ]
    for role, workers in (("prefill", prefills), ("decode", decodes)):
        if not any(info in within for info in workers):
            limit = max(info.max_context for info in workers)
            raise TooLong(
                f"{n_tokens} tokens and up to {n_new} new ones are {n_tokens + n_new}; "
                f"the longest context of any {role} worker is {limit} tokens"
            )
    prompt_pages = -(-n_tokens // block_size)
    all_pages = -(-(n_tokens + n_new - 1) // block_size)
    able_prefills = [
        info
        for info in prefills
        if info in within and (info.n_blocks == 0 or info.n_blocks >= prompt_pages)
    ]
    if not able_prefills:
        raise TooLong(
            f"{n_tokens} tokens need {prompt_pages} pages of {block_size} tokens; the largest "
            f"prefill worker has {max(info.n_blocks for info in prefills)}"
        )
    able_decodes = [info for info in decodes if info in within and info.n_blocks >= all_pages]
    if not able_decodes:
        raise TooLong(
            f"{n_tokens} tokens and up to {n_new} new ones need {all_pages} pages of "
            f"{block_size} tokens; the largest decode worker has "
            f"{max(info.n_blocks for info in decodes)}"
        )
    return able_prefills, able_decodes
