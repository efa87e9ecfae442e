"""Run one forward pass of a prefill batch, with KV coming in and going out layer by layer.

Runs in the forward thread. Before a layer's attention it waits for that layer of the cached
blocks (the next layers load meanwhile). As soon as the KV of a group of layers is in the pool, it
is handed to the transfer engine (Mooncake, arXiv 2407.00079, section 5.2). A request whose cached
blocks fail to come is marked and runs on over what is in its pages: the others in the batch must
not suffer, and its result is thrown away.

A pass of one stage of a group has one chunk. The stage's engine runs its layers, between the
activations of the stage before and those for the next one. Both engines use one pool, whose pages
have all layers:

    page p of the pool │ layers of stage 0 │ layers of stage 1 │ …
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from halfmoon_engine.interface import (
    Draw,
    Engine,
    PendingToken,
    PromptScoring,
    Run,
    StageActivations,
    TokenResult,
)
from halfmoon_prefix_cache.layer_groups import layer_groups
from halfmoon_protocol.regions import Region
from halfmoon_runtime.clock import Clock
from halfmoon_scheduling.prefill.prefill_commands import StagePass
from halfmoon_scheduling.prefill.prefill_queue import PrefillChunk
from halfmoon_scheduling.prefill.prompt_share import WHOLE_PROMPT
from halfmoon_transfer.interface import Op, Piece, Transfer
from halfmoon_workers.prefill.prefill_job import ForwardPassRecord, PrefillJob


class SubmitTransfer(Protocol):
    """Submit transfers; see `TransferEngine.submit`."""

    def __call__(
        self, op: Op, pieces: Sequence[Piece], deadline_s: float = ..., *, verify: bool = ...
    ) -> Transfer:
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

    #: Computes whole prompts; a worker with one stage's layers alone has none, and
    #: `stage_engine` here.
    engine: Engine
    submit: SubmitTransfer
    pool: Region
    clock: Clock
    #: Computes one stage's layers over the same pool; None: the worker is in no group.
    stage_engine: Engine | None = None
    #: Waits in the forward thread for a layer that is being read; raises its error.
    wait_for: Callable[[Transfer], object] = lambda transfer: transfer.result()

    @property
    def takes_whole_prompts(self) -> bool:
        """Return whether all layers are here."""
        return self.engine.stage.is_whole

    @property
    def activation_bytes(self) -> int:
        """Bytes of one token's activations between two stages; 0: the worker is in no group."""
        return 0 if self.stage_engine is None else self.stage_engine.stage.activation_bytes

    def __call__(
        self,
        batch: Sequence[tuple[PrefillJob, PrefillChunk]],
        stage: StagePass | None = None,
    ) -> ForwardResult:
        """Compute these chunks, and hand on the KV of complete blocks.

        Args:
            batch: the requests and their chunks; one, if there is a stage.
            stage: the layers to compute, and the slots of their activations; None: all layers.
        """
        share = WHOLE_PROMPT if stage is None else stage.share
        layers = share.layers(self.engine.layout.n_layers)
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
                        # A further stage reads the layers of its own alone.
                        self.wait_for(job.loads[layer if job.order else layers[layer]])
                    except Exception as error:  # whatever it is, it is this job's alone
                        job.failure = error
            waited += self.clock.now() - since

        layout = self.engine.layout
        #: Of each request: the groups of layers to hand on, by the last layer of each.
        groups = [
            {
                group[-1]: layers[group.start : group.stop]
                for group in layer_groups(len(layers), len(complete) * layout.layer_bytes)
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

        engine = self.engine if stage is None else self.stage_engine
        assert engine is not None, "this worker is in no group"
        tokens = engine.forward(
            [self._run(job, chunk) for job, chunk in batch],
            before_layer=before_layer,
            after_layer=after_layer,
            activations=None if stage is None else _activations(*batch[0], stage),
        )
        ended = self.clock.now()
        for (job, chunk), complete in zip(batch, blocks, strict=True):
            job.n_streamed = complete.stop
            if job.start.trace is not None:
                job.passes.append(
                    ForwardPassRecord(began, ended, waited, chunk.start, chunk.stop, len(batch))
                )
        return ForwardResult(tokens, ended - began, waited)

    def finish(
        self, late: Sequence[tuple[PrefillJob, PendingToken]], wait_s: float
    ) -> list[TokenResult]:
        """Choose tokens that were late, each by the engine that computed its request."""
        chosen: dict[int, TokenResult] = {}
        for engine, is_whole in ((self.engine, True), (self.stage_engine, False)):
            own = [i for i, (job, _) in enumerate(late) if job.share.is_whole is is_whole]
            if own:
                assert engine is not None, "this worker is in no group"
                tokens = engine.finish([late[i][1] for i in own], wait_s)
                chosen.update(zip(own, tokens, strict=True))
        return [chosen[i] for i in range(len(late))]

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
            # Nothing checks these bytes after they have landed.
            write = self.submit("write", landing, deadline_s=left_s, verify=True)
            job.landing_writes.append(write)
        if not job.in_place:
            length = len(layers) * layout.layer_bytes
            job.n_sent_bytes += len(landing) * length
            job.n_held_bytes += (len(blocks) - len(landing)) * length
        if put := job.kvstore_pieces(self.pool, layout, layers, blocks):
            # A block's checksum is made of the pool's bytes; but a further stage's layers are read
            # back for it, so they have to be right in the kvstore.
            verify = job.order is not None
            job.put_writes.append(self.submit("write", put, deadline_s=left_s, verify=verify))

    def _run(self, job: PrefillJob, chunk: PrefillChunk) -> Run:
        start = job.start
        draw = None
        if chunk.last and job.share.is_last:
            history = start.token_ids if start.sampling.needs_history else ()
            draw = Draw(
                start.sampling,
                history,
                start.n_prompt,
                job.first_scores.extend,
                masked=job.masked_token_ids,
            )
        tokens = start.token_ids[chunk.start : chunk.stop]
        return Run(tokens, chunk.start, job.pages, draw, scoring=_scoring(job, chunk))


def _activations(job: PrefillJob, chunk: PrefillChunk, stage: StagePass) -> StageActivations:
    """Return the slots of a chunk's activations, before and behind the stage's layers."""
    incoming = outgoing = None
    if stage.incoming is not None:
        assert job.incoming is not None, "a chunk arrived without slots"
        incoming = job.incoming.view(stage.incoming, chunk.n_tokens)
    if stage.outgoing is not None:
        assert job.outgoing is not None, "a chunk is to be sent without slots"
        outgoing = job.outgoing.view(stage.outgoing, chunk.n_tokens)
    return StageActivations(incoming, outgoing)


def _scoring(job: PrefillJob, chunk: PrefillChunk) -> PromptScoring | None:
    """Score the client's prompt only: tokens of an earlier try were scored when they were new."""
    start = job.start
    if not job.share.is_last:
        return None
    n_top = start.sampling.prompt_logprobs
    targets = start.token_ids[chunk.start + 1 : min(chunk.stop + 1, start.n_prompt)]
    if n_top is None or not targets:
        return None
    return PromptScoring(targets, n_top, job.prompt_scores.extend)
