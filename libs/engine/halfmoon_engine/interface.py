"""An engine: a model over a pool of KV pages. The real one and the fake keep this contract.

An engine owns the arithmetic and nothing else: no queue, no page allocation, no socket. Its
caller says which tokens of which sequences to run and on which pages their KV lies. Calls
block and come from one thread at a time.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages import DecodeCost, PrefillCost
from halfmoon_protocol.sampling import Sampling

#: Device of a model's weights and KV; "auto" is CUDA if there is one, else the CPU.
Device = Literal["auto", "cpu", "cuda"]

#: Takes scores in the forward's thread, before `forward` returns.
OnLogprobs = Callable[[Sequence[TokenScore]], None]


class GrammarFailed(msgspec.Struct, frozen=True):
    """No token: the grammar that the answer must keep to could not be followed."""

    reason: str
    #: True when the grammar is at fault: it does not compile, no token fits, or it takes more
    #: time or memory than a request may. No other worker should try it. False when this worker
    #: can't follow it, or when the answer so far has left it.
    invalid: bool


class PendingToken:
    """No token yet: what the grammar allows next is still being computed.

    The run's KV is written. `Engine.finish` chooses the token; losing this loses the token.
    Engines keep what they need in a subclass.
    """


#: What a forward says of a run that wants a token.
TokenResult = int | PendingToken | GrammarFailed


class SequenceState(msgspec.Struct):
    """One request's place on a worker, where an engine keeps things from draw to draw."""

    #: The engine's own affair; None at first. Losing it costs time and nothing else.
    value: object | None = None


class Draw(msgspec.Struct, frozen=True):
    """Choose the token that follows a run."""

    sampling: Sampling
    #: Tokens so far when choosing looks at them (see `Sampling.needs_history`), else empty.
    history: Sequence[int] = ()
    #: How many of `history` are the client's prompt.
    n_prompt: int = 0
    #: Told the chosen token's score when `sampling.logprobs` asks for it.
    report: OnLogprobs | None = None
    #: The same one for every draw of a request; None: nothing is kept.
    scratch: SequenceState | None = None


class PromptScoring(msgspec.Struct, frozen=True):
    """Say how likely each of these tokens was, each after the run's token at its place."""

    #: What follows the run's tokens, in order, as far as it is known; at least one.
    targets: Sequence[int]
    #: Likeliest tokens to report at each place.
    n_top: int
    report: OnLogprobs


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
    #: The caller's promise that the pages were written by this engine alone since their
    #: content was last read (a decode step after the first): a pool that is mirrored on a
    #: device then needs no copy from the host. False is always right.
    continues: bool = False
    #: The scores that are wanted of tokens that are known already.
    scoring: PromptScoring | None = None


LayerHook = Callable[[int], None]


class Engine(Protocol):
    """A model, loaded, over a pool of pages that its caller registered for transfer."""

    @property
    def name(self) -> str:
        """The model's name as clients write it."""
        ...

    @property
    def layout(self) -> KvLayout:
        """What a page's bytes mean."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence that the model allows."""
        ...

    @property
    def n_vocab(self) -> int:
        """Tokens that it can read and draw: ids 0 to `n_vocab` - 1. Others may fail a forward."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, from the model's generation config."""
        ...

    def attach(self, pool: memoryview) -> None:
        """Use this memory as the pool: ``len(pool) // layout.block_bytes`` pages.

        The pool is written in place; page p starts at byte ``p * layout.block_bytes``.

        Raises:
            ValueError: it holds no page, or is read-only.
        """
        ...

    def detach(self) -> None:
        """Let go of the attached memory, so that its owner can close it."""
        ...

    def forward(
        self,
        runs: Sequence[Run],
        *,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> list[TokenResult | None]:
        """Run a ragged batch and choose the next token of each run that wants one.

        Args:
            runs: of different sequences, in any mix of lengths.
            before_layer: called with the layer's index before its attention reads the pool;
                may block (KV that is still on its way).
            after_layer: called once the layer's keys and values of these runs are in the
                pool's bytes; must be quick. An exception from either ends the forward.

        Returns:
            One entry per run: None where ``draw`` is None, else the token, or why there is
            none (yet), which concerns that run alone: other runs do not wait for a grammar.
            An engine without text (the fake) draws as if there were no grammar.
        """
        ...

    def finish(self, late: Sequence[PendingToken], wait_s: float) -> list[TokenResult]:
        """Choose the tokens that were late, waiting for so long at the most.

        Args:
            late: from `forward` or an earlier `finish` of this engine, each once.
            wait_s: seconds; 0 only looks.
        """
        ...

    def measure(self) -> tuple[PrefillCost, DecodeCost]:
        """Time a few forwards on scratch pages of the attached pool and fit the cost models.

        Takes a few seconds at the most; the pool must not be in use.
        """
        ...
