"""Define the contract of an engine: a model over a pool of KV pages.

Torch's engine and the fake one keep it. An engine owns the arithmetic and nothing else: no queue,
no page allocation, no socket. Its caller says which tokens of which sequences to run, and on which
pages their KV lies. Calls block and come from one thread at a time.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from halfmoon_models.pool_size import PoolRoom
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages import DecodeCost, PrefillCost
from halfmoon_protocol.sampling import Sampling

#: Device of a model's weights and KV; "auto" is CUDA if there is one, else the CPU.
Device = Literal["auto", "cpu", "cuda"]

#: Called with scores in the forward's thread, before `forward` returns.
OnLogprobs = Callable[[Sequence[TokenScore]], None]


class GrammarFailed(msgspec.Struct, frozen=True):
    """No token: the grammar of the answer could not be followed."""

    reason: str
    #: True when the grammar is at fault: it does not compile, no token fits, or it takes more
    #: time or memory than a request may. No other worker should try it. False when this worker
    #: can't follow it, or when the answer so far has left it.
    invalid: bool
    #: True when another try may succeed: the grammar's process was ended from outside.
    retryable: bool = False


class PendingToken:
    """No token yet: the mask of the grammar is still being computed.

    The run's KV is written. `Engine.finish` chooses the token; losing this loses the token.
    Engines keep their data in a subclass.
    """


#: Result of a run that wants a token.
TokenResult = int | PendingToken | GrammarFailed


class SequenceState(msgspec.Struct):
    """State that an engine keeps for one request from draw to draw."""

    #: Private to the engine; None at first. Losing it costs time and nothing else.
    value: object | None = None


class Draw(msgspec.Struct, frozen=True):
    """Choose the token that follows a run."""

    sampling: Sampling
    #: Tokens so far when choosing looks at them (see `Sampling.needs_history`), else empty.
    history: Sequence[int] = ()
    #: Number of tokens of `history` that are the client's prompt.
    n_prompt: int = 0
    #: Called with the score of the chosen token if `sampling.logprobs` is set.
    on_logprobs: OnLogprobs | None = None
    #: The same object for every draw of a request; None: no state is kept.
    state: SequenceState | None = None
    #: Tokens that are not chosen unless the grammar or the vocabulary leaves no other; ids beyond
    #: the vocabulary mean nothing.
    masked: Sequence[int] = ()


class PromptScoring(msgspec.Struct, frozen=True):
    """Score known tokens, each as the successor of the run's token at its place."""

    #: Known successors of the run's tokens, in order; at least one.
    targets: Sequence[int]
    #: Likeliest tokens to report at each place.
    n_top: int
    on_logprobs: OnLogprobs


class Run(msgspec.Struct, frozen=True):
    """Consecutive tokens of one sequence to run through the model in one forward.

    The KV of positions 0 … start-1 is in `pages` already; this run computes and writes
    positions start … start+len(token_ids)-1. Position i lives on page
    ``pages[i // block_size]``, slot ``i % block_size``.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    #: None: no token is wanted (a chunk that is not the last).
    draw: Draw | None
    #: True: only this engine has written the pages since it last read them (a decode step
    #: after the first). A pool that is mirrored on a device then needs no copy from the host.
    #: False is always right.
    continues: bool = False
    #: Scores of known tokens; None: none are wanted.
    scoring: PromptScoring | None = None


LayerHook = Callable[[int], None]


class EngineStage(msgspec.Struct, frozen=True, kw_only=True):
    """Name the layers that an engine computes: one of runs that follow each other.

    Engines of all stages of a model compute together what one engine of all layers computes.
    """

    index: int = 0
    n_stages: int = 1
    #: Of the model's layers, from 0.
    first_layer: int = 0
    n_layers: int
    #: Bytes of one token's activations between two stages; 0 for an engine of all layers.
    activation_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Return whether the engine computes all layers."""
        return self.n_stages == 1

    @property
    def is_first(self) -> bool:
        """Return whether the engine embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Return whether the engine chooses and scores tokens."""
        return self.index == self.n_stages - 1


class StageActivations(msgspec.Struct, frozen=True):
    """Carry the activations that one forward of a stage reads and writes.

    Both are contiguous, ``[sum of tokens, activation_bytes]``: a row for each token of the runs,
    in their order. The bytes mean something to engines of the same model only.
    """

    #: None at stage 0.
    incoming: memoryview | None
    #: Filled before `Engine.forward` returns; None at the last stage.
    outgoing: memoryview | None


class Engine(Protocol):
    """A model, or one stage of it, over a pool of pages that its caller registered for transfer."""

    @property
    def name(self) -> str:
        """Name of the model in requests."""
        ...

    @property
    def stage(self) -> EngineStage:
        """Layers that this engine computes: all of them, or those of one stage."""
        ...

    @property
    def layout(self) -> KvLayout:
        """Layout of a page's bytes: of all layers of the model, as landings and kvstores have it.

        A stage reads and writes the bytes of its own layers, and leaves the others alone.
        """
        ...

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence that the model allows."""
        ...

    @property
    def n_vocab(self) -> int:
        """Number of token ids, from 0. Other ids may fail a forward."""
        ...

    @property
    def description(self) -> str:
        """Name of what computes the model, for the log and for operators."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, from the model's generation config."""
        ...

    def open_stage(self, index: int, n_stages: int) -> "Engine":
        """Return an engine of one stage that uses the weights of this one, not a copy of them.

        It has a pool of its own, which is not attached yet. Calls of both engines come from one
        thread at a time.

        Args:
            index: of the stage, from 0.
            n_stages: runs that the layers are cut into; at least 2.

        Raises:
            BadEngineStage: this is a stage already, there is no such stage, or the model can't be
                cut so.
        """
        ...

    def attach(self, pool: memoryview) -> None:
        """Use this memory as the pool: ``len(pool) // layout.block_bytes`` pages.

        The pool is written in place; page p starts at byte ``p * layout.block_bytes``.

        Raises:
            ValueError: it holds no page, or is read-only.
        """
        ...

    def pool_room(self) -> PoolRoom:
        """Say where the bytes of a pool would lie, and what a device has left for them."""
        ...

    def allocate_pool(self, n_bytes: int) -> object | None:
        """Use memory of the model's own device as the pool, and return it to be registered.

        Returns:
            Contiguous bytes that a transfer engine accepts; None: the pool is memory of the
            host, which `attach` takes.
        """
        ...

    def detach(self) -> None:
        """Release the attached memory, so that its owner can close it."""
        ...

    def forward(
        self,
        runs: Sequence[Run],
        *,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
        activations: StageActivations | None = None,
    ) -> list[TokenResult | None]:
        """Run a ragged batch and choose the next token of each run that wants one.

        Args:
            runs: of different sequences, in any mix of lengths. Only the last stage may be asked
                for tokens and scores.
            before_layer: called with the layer's index before its attention reads the pool;
                may block (KV that is still on its way). Indices count from the stage's first.
            after_layer: called once the layer's keys and values of these runs are in the
                pool's bytes; must be quick. An exception from either ends the forward.
            activations: of the stages around this one; None for an engine of all layers.

        Returns:
            One entry per run: None where ``draw`` is None, else the token, or the reason why
            there is none (yet). Runs do not wait for the grammars of others. An engine without
            text (the fake) draws as if there were no grammar.
        """
        ...

    def finish(self, late: Sequence[PendingToken], wait_s: float) -> list[TokenResult]:
        """Choose the tokens that were late, waiting at most so long.

        Args:
            late: from `forward` or an earlier `finish` of this engine, each once.
            wait_s: seconds; 0 does not wait.
        """
        ...

    def check_alive(self) -> None:
        """Check that the engine can still compute; quick, and called from any thread.

        Raises:
            EngineLost: a process of the engine ended.
        """
        ...

    def measure(self) -> tuple[PrefillCost, DecodeCost]:
        """Time a few forwards on scratch pages of the attached pool and fit the cost models.

        Takes a few seconds at the most; the pool must not be in use.
        """
        ...
