"""Find the workers that a request fits: by context, pages and features. Waiting changes none."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from halfmoon_protocol.features import common_features, needed_features, stated_features
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.events import Request

#: Tokens of an answer with an open end that a decode worker has room for, or it gets none of it.
#: Most answers are shorter, and to go on elsewhere costs a prefill.
OPEN_END_ROOM_TOKENS = 2048


class NoWorkerFits(Exception):
    """A request that fits no worker; the message names the number and the limit.

    NoWorkerFits
    └── FeatureMissing   no worker has a feature that the request needs
    """


class FeatureMissing(NoWorkerFits):
    """A request that asks for what no worker here can do; the message names it."""


@dataclass(frozen=True, slots=True)
class RoleCapacity:
    """The workers of one role, and the request size that fits each of them."""

    workers: tuple[WorkerInfo, ...]
    #: The least limits of all workers: tokens of prompt and output, and pages. A worker's limit
    #: of 0 is no limit.
    max_context: float
    n_blocks: float
    #: Features that all of them have.
    features: frozenset[str]

    @classmethod
    def of(cls, workers: Iterable[WorkerInfo]) -> "RoleCapacity":
        """Return the capacity of these workers, perhaps none."""
        members = tuple(workers)
        return cls(
            members,
            min((_limit(info.max_context) for info in members), default=inf),
            min((_limit(info.n_blocks) for info in members), default=inf),
            common_features(members),
        )


def able_workers(
    request: Request, prefills: RoleCapacity, decodes: RoleCapacity, block_size: int
) -> tuple[Sequence[WorkerInfo], Sequence[WorkerInfo]]:
    """Return the prefill and decode workers that could take the request if they were idle.

    A decode worker must hold prompt and output, except the last token's KV, which is never needed.
    Of an open end it must hold `OPEN_END_ROOM_TOKENS`. A limit of 0 (of pages, of a model's
    context) is no limit. Most requests fit everywhere, which takes a few comparisons.

    Args:
        request: with its whole prompt and the tokens it may add.
        prefills: prefill workers, at least one.
        decodes: decode workers, at least one.
        block_size: tokens per page.

    Raises:
        FeatureMissing: no worker of a role has the features that the request needs.
        NoWorkerFits: one of the two lists would be empty.
    """
    prefills = _with_features(request, prefills)
    decodes = _with_features(request, decodes)
    n_tokens, n_new = len(request.token_ids), request.stopping.max_new_tokens
    prompt_pages = -(-n_tokens // block_size)
    n_held = min(n_new, OPEN_END_ROOM_TOKENS) if request.open_end else n_new
    all_pages = -(-(n_tokens + n_held - 1) // block_size)
    if (
        n_tokens + n_new <= min(prefills.max_context, decodes.max_context)
        and prompt_pages <= prefills.n_blocks
        and all_pages <= decodes.n_blocks
    ):
        return prefills.workers, decodes.workers
    able: list[list[WorkerInfo]] = []
    for role, capacity in (("prefill", prefills), ("decode", decodes)):
        within = [i for i in capacity.workers if n_tokens + n_new <= _limit(i.max_context)]
        if not within:
            limit = max(info.max_context for info in capacity.workers)
            raise NoWorkerFits(
                f"{n_tokens} tokens and up to {n_new} new ones are {n_tokens + n_new}; "
                f"the longest context of any {role} worker is {limit} tokens"
            )
        able.append(within)
    able_prefills = [info for info in able[0] if prompt_pages <= _limit(info.n_blocks)]
    if not able_prefills:
        raise NoWorkerFits(
            f"{n_tokens} tokens need {prompt_pages} pages of {block_size} tokens; the largest "
            f"prefill worker has {max(info.n_blocks for info in prefills.workers)}: shorten the "
            "prompt, or have the operator raise --pool-mib"
        )
    able_decodes = [info for info in able[1] if all_pages <= _limit(info.n_blocks)]
    if not able_decodes:
        raise NoWorkerFits(
            f"{n_tokens} tokens and up to {n_held} new ones need {all_pages} pages of "
            f"{block_size} tokens; the largest decode worker has "
            f"{max(info.n_blocks for info in decodes.workers)}: ask for fewer new tokens or "
            "set no limit, or have the operator raise --pool-mib"
        )
    return able_prefills, able_decodes


def stopping_at(request: Request, decode: WorkerInfo, block_size: int) -> Stopping:
    """Return the end of a try at a decode worker: an open end is where its pages end."""
    if not (request.open_end and decode.n_blocks):
        return request.stopping
    # The last token's KV is never needed.
    room = decode.n_blocks * block_size + 1 - len(request.token_ids)
    if room >= request.stopping.max_new_tokens:
        return request.stopping
    return msgspec.structs.replace(request.stopping, max_new_tokens=max(1, room))


def fits_prefill(request: Request, info: WorkerInfo, block_size: int) -> bool:
    """Return whether a prefill worker could take a request if it were idle."""
    if not needed_features(request.sampling, request.stopping, "prefill") <= stated_features(info):
        return False
    n_tokens = len(request.token_ids)
    n_new = request.stopping.max_new_tokens
    n_pages = -(-n_tokens // block_size)
    return n_tokens + n_new <= _limit(info.max_context) and n_pages <= _limit(info.n_blocks)


def _with_features(request: Request, capacity: RoleCapacity) -> RoleCapacity:
    """Return the workers that have the features a request needs; mostly that is all of them.

    Raises:
        FeatureMissing: no worker has all of them.
    """
    role = capacity.workers[0].role
    needed = needed_features(request.sampling, request.stopping, role)
    if needed <= capacity.features:
        return capacity
    able = [info for info in capacity.workers if needed <= stated_features(info)]
    if not able:
        known = [stated_features(info) for info in capacity.workers]
        nowhere = sorted(needed.difference(*known)) or sorted(needed)
        raise FeatureMissing(
            f"no {role} worker of this cluster has {', '.join(nowhere)}, which the request needs:"
            f" leave it out, or add a worker with it"
        )
    return RoleCapacity.of(able)


def _limit(stated: int) -> float:
    return stated or inf
