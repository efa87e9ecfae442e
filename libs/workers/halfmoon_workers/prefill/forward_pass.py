"""Run one forward pass of a prefill batch, with KV coming in and going out layer by layer.

Runs in the forward thread. Before a layer's attention it waits for that layer of the cached
blocks (the next layers load meanwhile). As soon as the KV of a group of layers is in the pool, it
is handed to the transfer engine (Mooncake, arXiv 2407.00079, section 5.2). A request whose cached
blocks fail to come is marked and runs on over what is in its pages: the others in the batch must
not suffer, and its result is thrown away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from halfmoon_engine.interface import Draw, Engine, PromptScoring, Run, TokenResult
from halfmoon_prefix_cache.layer_groups import layer_groups
from halfmoon_protocol.regions import Region
from halfmoon_runtime.clock import Clock
from halfmoon_scheduling.prefill.prefill_queue import PrefillChunk
from halfmoon_transfer.interface import Op, Piece, Transfer
from halfmoon_workers.prefill.prefill_job import ForwardPassRecord, PrefillJob


class SubmitTransfer(Protocol):
    """Submit transfers; see `TransferEngine.submit`."""

    def __call__(self, op: Op, pieces: Sequence[Piece], deadline_s: float = ...) -> Transfer:
        """Start a transfer; never waits for the network."""
        ...


@dataclass(frozen=True)
class ForwardResult:
    """The results of one forward pass of a batch."""

    #: One entry a chunk: what was chosen where the chunk is its prompt's last, else None.
    tokens: Sequence[TokenResult | None] = ()
    #: Seconds of the pass; of these, seconds of waits for cached layers.
    compute_s: float = 0.0
    layers_wait_s: float = 0.0


@dataclass(frozen=True)
class PrefillForward:
    """Runs batches of chunks on an engine and streams their KV."""

    engine: Engine
    submit: SubmitTransfer
    pool: Region
    clock: Clock

    def __call__(self, batch: Sequence[tuple[PrefillJob, PrefillChunk]]) -> ForwardResult:
        """Compute these chunks, and hand on the KV of complete blocks."""
        blocks = [job.complete_blocks(chunk.stop, self.engine.layout) for job, chunk in batch]
        began = self.clock.now()
        waited = 0.0
        for job, _ in batch:
            job.computing_since_s = job.computing_since_s or began

        def before_layer(layer: int) -> None:
            nonlocal waited
            since = self.clock.now()
            for job, _ in batch:
                if job.loads and job.failure is None:
                    try:
                        job.loads[layer].result()
                    except Exception as error:  # whatever it is, it is this job's alone
                        job.failure = error
            waited += self.clock.now() - since

        layout = self.engine.layout
        #: Of each request: the groups of layers to hand on, by the last layer of each.
        groups = [
            {
                group[-1]: group
                for group in layer_groups(layout.n_layers, len(complete) * layout.layer_bytes)
            }
            for complete in blocks
        ]

        def after_layer(layer: int) -> None:
            for (job, _), complete, by_last in zip(batch, blocks, groups, strict=True):
                if complete and job.failure is None and (group := by_last.get(layer)) is not None:
                    try:
                        self._hand_on(job, group, complete)
                    except Exception as error:
                        job.failure = error

        tokens = self.engine.forward(
            [self._run(job, chunk) for job, chunk in batch],
            before_layer=before_layer,
            after_layer=after_layer,
        )
        ended = self.clock.now()
        for (job, chunk), complete in zip(batch, blocks, strict=True):
            job.n_streamed = complete.stop
            if job.start.trace is not None:
                job.passes.append(
                    ForwardPassRecord(began, ended, waited, chunk.start, chunk.stop, len(batch))
                )
        return ForwardResult(tokens, ended - began, waited)

    def _hand_on(self, job: PrefillJob, layers: range, blocks: Sequence[int]) -> None:
        """Start the writes of these layers of these blocks."""
        layout = self.engine.layout
        now = self.clock.now()
        left_s = job.write_until_s - now
        if left_s <= 0:
            job.failure = TimeoutError("the landing's time ran out before its KV was computed")
            return
        job.landing_since_s = job.landing_since_s or now
        if landing := job.landing_pieces(self.pool, layout, layers, blocks):
            job.landing_writes.append(self.submit("write", landing, deadline_s=left_s))
        if put := job.kvstore_pieces(self.pool, layout, layers, blocks):
            job.put_writes.append(self.submit("write", put, deadline_s=left_s))

    def _run(self, job: PrefillJob, chunk: PrefillChunk) -> Run:
        start = job.start
        draw = None
        if chunk.last:
            history = start.token_ids if start.sampling.needs_history else ()
            draw = Draw(start.sampling, history, start.n_prompt, job.first_scores.extend)
        tokens = start.token_ids[chunk.start : chunk.stop]
        return Run(tokens, chunk.start, job.pages, draw, scoring=_scoring(job, chunk))


def _scoring(job: PrefillJob, chunk: PrefillChunk) -> PromptScoring | None:
    """Score the client's prompt only: tokens of an earlier try were scored when they were new."""
    start = job.start
    n_top = start.sampling.prompt_logprobs
    targets = start.token_ids[chunk.start + 1 : min(chunk.stop + 1, start.n_prompt)]
    if n_top is None or not targets:
        return None
    return PromptScoring(targets, n_top, job.prompt_scores.extend)
