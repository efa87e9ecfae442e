"""Count what a decode worker does, and collect its metrics."""

from typing import Literal

from halfmoon_runtime.observability.histogram import FastHistogram, time_buckets, token_buckets
from halfmoon_runtime.observability.metrics import MetricSnapshot, by_label
from halfmoon_scheduling.decode.decode_batch import DecodeBatch
from halfmoon_scheduling.decode.page_allocator import PageAllocator

#: Pages were refused; the KV did not land in time; pages ran out; the step failed.
GiveUpReason = Literal["refused", "not_landed", "preempted", "step_failed"]


class DecodeCounts:
    """Count steps, tokens and failures since the start."""

    def __init__(self) -> None:
        self._step_s = FastHistogram(time_buckets(0.0005, 10.0))
        self._n_rows = FastHistogram(token_buckets(1000))
        self._n_tokens = 0
        self._landed = {"sent": 0, "held": 0}
        self._given_up: dict[GiveUpReason, int] = dict.fromkeys(
            ("refused", "not_landed", "preempted", "step_failed"), 0
        )

    def on_step(self, took_s: float, n_rows: int) -> None:
        """Count a forward pass with `n_rows` requests."""
        self._step_s.observe(took_s)
        self._n_rows.observe(n_rows)

    def on_tokens(self, n_tokens: int) -> None:
        """Count the tokens of a step."""
        self._n_tokens += n_tokens

    def on_landed(self, n_sent: int, n_held: int) -> None:
        """Count the blocks of a prompt that starts: those that landed, and those held before."""
        self._landed["sent"] += n_sent
        self._landed["held"] += n_held

    def on_give_up(self, why: GiveUpReason) -> None:
        """Count a request that is not decoded here, or no longer."""
        self._given_up[why] += 1

    def metrics(self) -> MetricSnapshot:
        """Return all counts as metrics."""
        return {
            "halfmoon_decode_step_seconds": ("Forward passes of the batch.", self._step_s),
            "halfmoon_decode_batch_requests": ("Requests in a forward pass.", self._n_rows),
            "halfmoon_decode_tokens_total": (
                "Tokens generated here; a request's first one is prefill's.",
                self._n_tokens,
            ),
            "halfmoon_decode_prompt_blocks_total": (
                "Blocks of prompts that started here: sent by prefill, or held already in pages of"
                " earlier requests.",
                by_label("source", self._landed),
            ),
            "halfmoon_decode_failures_total": (
                "Requests that were refused pages, whose KV did not land in time, that had to"
                " make room, or whose step failed.",
                by_label("reason", self._given_up),
            ),
        }


def batch_metrics(batch: DecodeBatch, pages: PageAllocator) -> MetricSnapshot:
    """Return metrics of the batch and its pages; `DecodeBatch` explains pages aside."""
    landing, aside = batch.pages_landing, batch.pages_quarantined
    return {
        "halfmoon_decode_requests": (
            "Requests here, by what they do: running, or waiting for their KV to land.",
            by_label("state", {"running": batch.n_running, "landing": batch.n_reserved}),
        ),
        "halfmoon_decode_context_tokens": (
            "Tokens that the next step attends to.",
            batch.context_tokens,
        ),
        "halfmoon_decode_kept_pages": (
            "Free pages whose KV is found by later requests, until their memory is wanted.",
            pages.kept.n_unheld,
        ),
        "halfmoon_pages": (
            "Pages of this worker's pool by state.",
            by_label(
                "state",
                {
                    "free": pages.n_free,
                    "used": pages.n_pages - pages.n_free - landing - aside,
                    "landing": landing,
                    "aside": aside,
                },
            ),
        ),
    }
