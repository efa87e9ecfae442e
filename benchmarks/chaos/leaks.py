"""Find what services still hold for requests, from their metrics and `/debug/cluster`."""

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

#: Metrics that are 0 while there are no requests; with labels, only in these states.
_HELD: Mapping[str, tuple[str, ...]] = {
    "halfmoon_pages": ("used", "landing", "aside"),
    "halfmoon_prefill_requests": (),
    "halfmoon_prefill_queued_tokens": (),
    "halfmoon_decode_requests": (),
    "halfmoon_decode_pending_answer_blocks": (),
    "halfmoon_kvstore_blocks": ("reserved", "writing"),
    "halfmoon_kvstore_leased_blocks": (),
    "halfmoon_kvstore_promoting_blocks": (),
    "halfmoon_transfers_live": (),
    "halfmoon_kvstore_disk_off": (),
}
#: Metric and label of the blocks that fit on a kvstore's disk.
_DISK_CAPACITY = "halfmoon_kvstore_capacity_blocks", "disk"


def held_by_worker(name: str, metrics: str) -> list[str]:
    """Describe what a worker holds, from its metrics as Prometheus reads them."""
    held = []
    for family in text_string_to_metric_families(metrics):
        states = _HELD.get(family.name)
        for sample in family.samples:
            state = sample.labels.get("state", "")
            if states is not None and sample.value and (not states or state in states):
                label = f"{{{state}}}" if state else ""
                held.append(f"{name} has {sample.value:.0f} of {family.name}{label}")
            if (sample.name, sample.labels.get("tier")) == _DISK_CAPACITY and not sample.value:
                held.append(f"{name} does not use its disk")
    return held


def sum_of(family_name: str, metrics: str) -> float:
    """Return the sum of a metric over its labels; 0 if it is not there."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(metrics)
        if family.name == family_name
        for sample in family.samples
    )


def held_by_conductor(name: str, cluster: Mapping[str, Any]) -> list[str]:
    """Describe the requests that a conductor has, from its `/debug/cluster`."""
    requests: Mapping[str, int] = cluster["requests"]
    return [f"{name} has {n} requests {phase}" for phase, n in requests.items() if n]
