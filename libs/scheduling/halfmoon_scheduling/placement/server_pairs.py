"""Pair prefill and decode workers that are one server: its KV can't leave it.

A plain inference server computes a prompt and its answer in one process. It appears as a prefill,
a decode and a kvstore worker with the same `WorkerInfo.server`. A prompt that is prefilled at a
server is decoded there. Workers without a server work with each other, as in a cluster without
servers.
"""

from collections.abc import Mapping, Sequence

import msgspec

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_scheduling.placement.decode_choice import choose_decode
from halfmoon_scheduling.placement.estimates import (
    DecodeCandidate,
    Estimate,
    Placement,
    PlacementRequest,
    PrefillCandidate,
    most_known,
)
from halfmoon_scheduling.placement.placement_mode import PlacementMode, TtftSlo


def paired_workers(
    prefills: Sequence[WorkerInfo], decodes: Sequence[WorkerInfo]
) -> tuple[Sequence[WorkerInfo], Sequence[WorkerInfo]]:
    """Return the prefill workers with a decode worker to go with, and the reverse."""
    servers = {info.server for info in prefills} & {info.server for info in decodes}
    return (
        [info for info in prefills if info.server in servers],
        [info for info in decodes if info.server in servers],
    )


def with_decode_steps(
    prefills: Sequence[PrefillCandidate],
    decodes: Sequence[DecodeCandidate],
    servers: Mapping[WorkerId, str],
) -> list[PrefillCandidate]:
    """Add a decode step to the queue of each prefill worker of a server that decodes.

    Both share the server's steps. A prompt waits for half of the present step, and its own steps
    hold the tokens of the requests that decode: about a step in all. So an idle server is
    preferred to a busy one unless a cached prefix saves more.
    """
    steps_s = {
        servers[decode.worker_id]: decode.step_s
        for decode in decodes
        if decode.n_requests and decode.worker_id in servers
    }
    return [
        msgspec.structs.replace(candidate, queue_s=candidate.queue_s + steps_s[server])
        if (server := servers.get(candidate.worker_id)) in steps_s
        else candidate
        for candidate in prefills
    ]


def choose_pair(
    mode: PlacementMode,
    job: PlacementRequest,
    rows: Sequence[Estimate],
    decodes: Sequence[DecodeCandidate],
    servers: Mapping[WorkerId, str],
    ttft_slo_s: TtftSlo,
) -> Placement:
    """Choose the best row that has a decode worker with room, and that worker.

    Args:
        mode: which row is the best.
        job: the request.
        rows: estimates of all prefill workers that can take it; at least one.
        decodes: decode workers that could ever hold it; those without room are skipped.
        servers: the server of each worker that is a part of one.
        ttft_slo_s: the limit of its time to first token at a prefill worker.

    Returns:
        The placement; without a decode worker when no row has one with room.
    """
    members: dict[str, list[DecodeCandidate]] = {}
    for decode in decodes:
        members.setdefault(servers.get(decode.worker_id, ""), []).append(decode)
    best = {server: choose_decode(job, group) for server, group in members.items()}
    full = (None, 0.0)
    with_room, without = [], set()
    for row in rows:
        if best.get(servers.get(row.worker_id, ""), full)[0] is None:
            without.add(row.worker_id)
        else:
            with_room.append(row)
    chosen, preferred = mode.choose(job, with_room or rows, ttft_slo_s)
    worker_id, tbt_s = best.get(servers.get(chosen.worker_id, ""), full)
    return Placement(
        chosen,
        worker_id,
        tbt_s,
        tuple(rows),
        preferred,
        without_room=frozenset(without),
        known_blocks=most_known(rows),
    )
