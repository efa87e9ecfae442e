"""Place long prompts at groups of prefill workers, beside single ones.

A worker's record says which stage of which group it is. A group is complete when all its stages
are live and take work; its members take prompts by themselves as well. A group keeps all of its
members busy for one prompt. So it must bring the first token sooner by a factor: a small gain
would cost the next prompts more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import PrefillCost, Stage, WorkerInfo
from halfmoon_protocol.stage_layers import stage_weights
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.prediction.cost_model import CostModel
from halfmoon_scheduling.prediction.pipeline_latency import stage_ends_s

#: Missing stages that a fault names at the most.
_MAX_NAMED = 8


class PrefillGroup(msgspec.Struct, frozen=True):
    """Live prefill workers that hold the layers of the model in stages."""

    name: str
    #: One per stage, in their order.
    members: tuple[WorkerId, ...]
    #: Cost of the whole model at the slowest member, and each stage's part of it.
    cost: PrefillCost
    weights: tuple[float, ...]
    chunk_tokens: int
    hop_s: float


class GroupEstimate(Estimate, frozen=True, gc=False):
    """The estimate of a group; `worker_id` is its first stage."""

    group: str
    members: tuple[WorkerId, ...]
    #: Seconds from the first pass for which each member is busy with the prompt.
    stage_s: tuple[float, ...]

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All members: each computes and writes."""
        return self.members


def complete_groups(workers: Iterable[WorkerInfo]) -> tuple[PrefillGroup, ...]:
    """Return the groups with all of their stages among these workers, by their names.

    Several workers may state the same stage: the first id has it, the others are spares.
    """
    stages: dict[tuple[str, int], dict[int, WorkerInfo]] = {}
    for info in sorted(workers, key=lambda info: info.worker_id):
        if info.stage is not None:
            members = stages.setdefault((info.stage.group, info.stage.n_stages), {})
            members.setdefault(info.stage.index, info)
    groups = []
    for (name, n_stages), members in sorted(stages.items()):
        # The count comes from a worker: allocate nothing of that size.
        if (
            n_stages < 2
            or len(members) != n_stages
            or not 0 <= min(members) <= max(members) < n_stages
        ):
            continue
        infos = [members[index] for index in range(n_stages)]
        costs = [info.prefill_cost or PrefillCost() for info in infos]
        declared = [info.stage for info in infos if info.stage is not None]
        if _layers_fault({info.worker_id: info.stage for info in infos if info.stage}):
            continue
        groups.append(
            PrefillGroup(
                name,
                tuple(info.worker_id for info in infos),
                PrefillCost(
                    max(cost.c0_s for cost in costs),
                    max(cost.c1_s for cost in costs),
                    max(cost.c2_s for cost in costs),
                ),
                _weights(declared),
                min(stage.chunk_tokens for stage in declared),
                max(stage.hop_s for stage in declared),
            )
        )
    return tuple(groups)


def group_faults(workers: Iterable[WorkerInfo]) -> dict[str, str]:
    """Say what is wrong with groups, by their names: stages that are missing, twice or contradict.

    A stage that two workers state does no harm: the second one is a spare. Members of other
    numbers of stages never become one group.

    Args:
        workers: live prefill workers that take new work.
    """
    groups: dict[str, dict[WorkerId, Stage]] = {}
    for info in sorted(workers, key=lambda info: info.worker_id):
        if info.stage is not None:
            groups.setdefault(info.stage.group, {})[info.worker_id] = info.stage
    faults = {name: _group_fault(members) for name, members in groups.items()}
    return {name: fault for name, fault in faults.items() if fault}


def _group_fault(members: Mapping[WorkerId, Stage]) -> str:
    """Say what is wrong with the members of one group; empty if nothing is."""
    first, stage = next(iter(members.items()))
    holders: dict[int, WorkerId] = {}
    for worker_id, other in members.items():
        if other.n_stages != stage.n_stages:
            return (
                f"{first} says that it has {stage.n_stages} stages, {worker_id} says "
                f"{other.n_stages}: start all members with the same number"
            )
        if other.index >= other.n_stages:
            return f"{worker_id} says that it is stage {other.index} of {other.n_stages}"
        holder = holders.setdefault(other.index, worker_id)
        if holder != worker_id and len(members) <= stage.n_stages:
            return f"{holder} and {worker_id} both say that they are stage {other.index}"
    missing = [index for index in range(stage.n_stages) if index not in holders]
    if not missing:
        return _layers_fault({worker_id: members[worker_id] for worker_id in holders.values()})
    named = ", ".join(map(str, missing[:_MAX_NAMED])) + ", …" * (len(missing) > _MAX_NAMED)
    return f"of its {stage.n_stages} stages, no worker is stage {named}"


def _layers_fault(members: Mapping[WorkerId, Stage]) -> str:
    """Say where the layers of a group's stages do not join up; empty if they do.

    Args:
        members: one of each stage.
    """
    end, before = 0, ""
    silent = [name for name, stage in members.items() if not stage.n_layers]
    if len(silent) == len(members):
        return ""  # runs of equal length
    if silent:
        return f"{silent[0]} does not say which layers it has, other members do"
    for name, stage in sorted(members.items(), key=lambda member: member[1].index):
        if stage.first_layer != end:
            told = f"{before} ends with layer {end - 1}" if before else "the model begins with 0"
            return f"stage {stage.index} at {name} begins with layer {stage.first_layer}, {told}"
        end, before = end + stage.n_layers, name
    return ""


def _weights(stages: Sequence[Stage]) -> tuple[float, ...]:
    """Return each stage's part of a prompt's seconds."""
    if all(stage.n_layers for stage in stages):
        return stage_weights([stage.n_layers for stage in stages])
    return (1 / len(stages),) * len(stages)


def prefer_group(
    placement: Placement,
    job: PlacementRequest,
    groups: Sequence[PrefillGroup],
    costs: CostModel,
    *,
    single: Callable[[WorkerId], Estimate | None],
    n_active: int,
    least_gain: float,
) -> Placement:
    """Add the groups' rows to a placement, and choose a group if it is better by a factor.

    A group uses the prefix that its first stage would use. Each stage reads the part for its layers
    from the same kvstore. So a prefix that is local to one member goes to the other stages over
    the network.

    Args:
        placement: the best single worker, and the rows it was chosen from.
        job: the request.
        groups: complete groups; one with a member without a row is skipped.
        costs: predictions.
        single: returns the row of one worker; None: it can't take the request.
        n_active: transfers under way at the kvstore that a prefix would come from.
        least_gain: how many times as long the single worker must take for a group.
    """
    n_computed = job.n_tokens - placement.chosen.n_blocks * job.block_size
    groups = [group for group in groups if n_computed > group.chunk_tokens]
    if not groups:
        return placement
    rows: list[GroupEstimate] = []
    for group in groups:
        members = [row for row in map(single, group.members) if row is not None]
        if len(members) == len(group.members):
            rows.append(_estimate(job, group, members, costs, n_active))
    best = min(rows, key=lambda row: (row.ttft_s, row.queue_s, row.worker_id), default=None)
    chosen: Estimate = placement.chosen
    if best is not None and chosen.ttft_s >= least_gain * best.ttft_s:
        chosen = best
    return replace(placement, chosen=chosen, estimates=(*placement.estimates, *rows))


def _estimate(
    job: PlacementRequest,
    group: PrefillGroup,
    members: Sequence[Estimate],
    costs: CostModel,
    n_active: int,
) -> GroupEstimate:
    head = members[0]
    transfer_s = head.transfer_s
    if head.source is not None and not head.transfer_blocks:
        n_bytes = int(head.n_blocks * job.block_bytes * (1 - group.weights[0]))
        transfer_s = costs.transfer_s(head.source, group.members[1], n_bytes, n_active)
    ends_s = stage_ends_s(
        group.cost,
        job.n_tokens,
        head.n_blocks * job.block_size,
        weights=group.weights,
        chunk_tokens=group.chunk_tokens,
        hop_s=group.hop_s,
    )
    slowest = max(costs.scale(member) for member in group.members)
    stage_s = tuple(slowest * seconds for seconds in ends_s)
    # A chunk needs all stages, so the prompt begins when the busiest member is free.
    queue_s = max(member.queue_s for member in members)
    return GroupEstimate(
        head.worker_id,
        head.home,
        head.local_blocks,
        head.source,
        head.n_blocks,
        head.transfer_blocks,
        queue_s,
        transfer_s,
        stage_s[-1],
        queue_s + transfer_s + stage_s[-1],
        group.name,
        group.members,
        stage_s,
    )
