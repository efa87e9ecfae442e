"""Read the few metrics of a server that Halfmoon needs from its Prometheus page.

A page has some thousand lines. Only those that are needed are parsed.
"""

import math
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from halfmoon_servers.client.server_description import ReportedLoad

#: Samples that are parsed: one for each needed metric and data-parallel rank.
MAX_SAMPLES = 4096
_CACHE_INFO = "vllm:cache_config_info"
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE = ("vllm:kv_cache_usage_perc", "sglang:token_usage")

Sample = tuple[str, Mapping[str, str], float]


class MetricsGarbage(ValueError):
    """A page that can't be read; the text says why."""


def read_load(page: bytes) -> ReportedLoad:
    """Return the load of a server.

    Raises:
        MetricsGarbage: the page can't be read, or has none of the metrics.
    """
    samples = _samples(page, (*_RUNNING, *_WAITING, *_USAGE))
    running = [value for name, _, value in samples if name in _RUNNING]
    waiting = [value for name, _, value in samples if name in _WAITING]
    usages = [value for name, _, value in samples if name in _USAGE]
    if not running:
        raise MetricsGarbage(f"no metric {_RUNNING[0]} or {_RUNNING[1]}")
    usage = sum(usages) / len(usages) if usages else 0.0
    return ReportedLoad(_count(sum(running)), _count(sum(waiting)), min(max(usage, 0.0), 1.0))


def read_cache_blocks(page: bytes) -> tuple[int | None, int | None]:
    """Return vLLM's block size, and the number of its blocks over all data-parallel ranks.

    Raises:
        MetricsGarbage: the page can't be read.
    """
    samples = _samples(page, (_CACHE_INFO,))
    sizes = [size for _, labels, _ in samples if (size := _number(labels, "block_size"))]
    counts = [count for _, labels, _ in samples if (count := _number(labels, "num_gpu_blocks"))]
    return (sizes[0] if sizes else None), (sum(counts) if counts else None)


def _samples(page: bytes, names: Iterable[str]) -> list[Sample]:
    """Parse the samples of these metrics, which are finite numbers."""
    starts = tuple(f"{name}{after}".encode() for name in names for after in "{ ")
    lines = [line for line in page.split(b"\n") if line.startswith(starts)]
    if len(lines) > MAX_SAMPLES:
        raise MetricsGarbage(f"{len(lines)} samples, over the limit of {MAX_SAMPLES}")
    try:
        text = b"\n".join(lines).decode() + "\n"
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if math.isfinite(sample.value)
        ]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise MetricsGarbage(f"not a page of metrics: {error}") from None


def _count(value: float) -> int:
    return int(min(max(value, 0.0), 2.0**40))


def _number(labels: Mapping[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 13 else None
