"""Keep answers within their grammars, with masks of allowed tokens from child processes.

A grammar is text that a client chose, and the cost of compiling and following it is unknown. So
processes with limits do that (`grammar_child`), one for each grammar. The forward's thread requests
masks before a forward pass and collects them after it. It does not wait for late ones: their tokens
are `PendingToken`, and other requests go on.

Each request has one budget of processor time, for compiling and for all its masks.
"""

import itertools
import logging
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from halfmoon_engine.interface import Draw, GrammarFailed
from halfmoon_engine.sampling.grammar_messages import (
    AdvanceGrammar,
    GrammarAdvanced,
    GrammarChildConfig,
)
from halfmoon_protocol.sampling import MAX_GRAMMAR_CPU_S, MAX_GRAMMAR_TOKEN_CPU_S
from halfmoon_sandbox import (
    Child,
    ChildStalled,
    ChildUnavailable,
    HandlerFailed,
    LimitExceeded,
    Sandbox,
)
from halfmoon_sandbox.child import wait_readable

log = logging.getLogger(__name__)

#: Grammars whose processes are kept, those used last.
_MAX_PROCESSES = 32
#: Grammars that are remembered since compiling them passed a limit.
_MAX_REFUSED = 1024
#: Address space of a child beyond its template's.
_MEMORY_BYTES = 512 * 1024 * 1024
#: Seconds between two checks of a template that is still loading.
_LOADING_POLL_S = 0.002

_decoder = msgspec.msgpack.Decoder(GrammarAdvanced)


class TokenMask:
    """Mask of the tokens allowed next in one answer: requested, and perhaps not known yet."""

    def __init__(self, following: "_Following", grammar: str, tokens: Sequence[int]) -> None:
        self.following = following
        self.grammar = grammar
        #: All tokens of the answer so far.
        self.tokens = tokens
        #: Allowed tokens by id, [n_vocab], at least one of them true; or the reason of a
        #: failure; None: not known yet.
        self.result: NDArray[np.bool_] | GrammarFailed | None = None
        self.retried = False
        #: Fresh processes that crashed over it.
        self.n_crashes = 0


class GrammarMasks:
    """Masks of all grammars in use with one model. For one thread.

    Args:
        argument: configuration of the child processes.
    """

    def __init__(self, argument: GrammarChildConfig) -> None:
        self._n_vocab = argument.n_vocab
        self._sandbox = Sandbox(
            "halfmoon_engine.sampling.grammar_child:make_handler",
            msgspec.msgpack.encode(argument),
            memory_bytes=_MEMORY_BYTES,
        )
        #: Processes by the text of their grammar.
        self._processes: OrderedDict[str, _Process] = OrderedDict()
        #: Grammars whose compilation passed a limit, with the failure.
        self._refused: OrderedDict[str, GrammarFailed] = OrderedDict()
        weakref.finalize(self, self._sandbox.close)

    @classmethod
    def for_model(cls, definition: str, n_vocab: int, eos_token_ids: Sequence[int]) -> Self | None:
        """Make the masks of a model; log a warning and return None where no token ends an answer.

        Args:
            definition: the ``tokenizer.json`` of all its tokens, without truncation and padding.
            n_vocab: number of logits.
            eos_token_ids: ends of an answer.
        """
        if not eos_token_ids:
            log.warning("requests with a grammar can't be served: no token ends an answer")
            return None
        return cls(GrammarChildConfig(definition, n_vocab, tuple(eos_token_ids)))

    def close(self) -> None:
        """End all child processes."""
        self._sandbox.close()

    def start(self) -> None:
        """Begin to load the template, so that the first request does not wait for it."""
        self._sandbox.start()

    def request_mask(self, draw: Draw) -> TokenMask:
        """Request the mask of a draw, and return it without waiting for its result."""
        kept = None if draw.state is None else draw.state.value
        following = kept if isinstance(kept, _Following) else _Following()
        if draw.state is not None:
            draw.state.value = following
        grammar = draw.sampling.grammar
        mask = TokenMask(following, grammar, draw.history[draw.n_prompt :])
        if (refused := self._refused.get(grammar)) is not None:
            mask.result = refused
            return mask
        self._process_of(grammar).add(mask)
        self._advance([mask])
        return mask

    def wait_for_masks(self, masks: Iterable[TokenMask], wait_s: float) -> None:
        """Wait until all these masks have a result, at most so long."""
        deadline_s = time.monotonic() + wait_s
        while missing := [mask for mask in masks if mask.result is None]:
            self._advance(missing)
            busy = {
                id(child): child
                for mask in missing
                if mask.result is None
                and (process := self._processes.get(mask.grammar)) is not None
                and (child := process.child) is not None
                and child.busy
            }
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            if busy:
                wait_readable(list(busy.values()), left_s)
            elif any(mask.result is None for mask in missing):
                time.sleep(min(left_s, _LOADING_POLL_S))

    def _advance(self, masks: Iterable[TokenMask]) -> None:
        for mask in masks:
            # The process may have been ended to make room for others: request the mask again.
            process = self._process_of(mask.grammar)
            process.add(mask)
            try:
                if process.child is None:
                    process.child = self._fork()
                if process.child is not None:
                    process.advance(self)
            except ChildUnavailable as error:
                log.warning("a grammar's process broke: %s", error)
                mask.result = _failed_for_now(error)

    def _process_of(self, grammar: str) -> "_Process":
        process = self._processes.get(grammar)
        if process is None:
            if len(self._processes) >= 2 * _MAX_PROCESSES:
                self._forget_unused()
            process = self._processes[grammar] = _Process()
        self._processes.move_to_end(grammar)
        return process

    def _forget_unused(self) -> None:
        unused = [g for g, p in self._processes.items() if p.child is None and p.idle]
        for grammar in unused:
            del self._processes[grammar]

    def _fork(self) -> Child | None:
        """Fork a child; return None while the template loads or all children are in use."""
        if not self._sandbox.started():
            return None
        if sum(process.child is not None for process in self._processes.values()) < _MAX_PROCESSES:
            return self._sandbox.fork()
        for grammar, process in list(self._processes.items()):
            if process.idle:
                process.close()
                del self._processes[grammar]
                return self._sandbox.fork()
        return None

    def remember_invalid(self, grammar: str, why: GrammarFailed) -> None:
        """Remember a grammar that can't be compiled within its budget."""
        self._refused[grammar] = why
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)

    def set_mask(self, mask: TokenMask, bits: bytes) -> None:
        """Set the result of a mask from its bits, the lowest first."""
        unpacked = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
        allowed = unpacked[: self._n_vocab].astype(np.bool_)
        mask.result = (
            allowed
            if allowed.any()
            else GrammarFailed("no token of the model fits what must come next", invalid=True)
        )


class _Following:
    """Progress of one answer in a process. Losing it costs time and nothing else."""

    _keys = itertools.count(1)

    def __init__(self) -> None:
        self.key = next(self._keys)
        #: The process that has followed the first `n_followed` tokens.
        self.child: Child | None = None
        self.n_followed = 0
        #: Processor seconds spent so far.
        self.spent_s = 0.0


class _Process:
    """The child process of one grammar, and the masks requested of it, one at a time."""

    def __init__(self) -> None:
        self.child: Child | None = None
        #: The mask under way, and those that wait; references to dropped masks are dead.
        self._current: weakref.ref[TokenMask] | None = None
        self._waiting: deque[weakref.ref[TokenMask]] = deque()
        #: Keys of the answers that this child has followed.
        self._served: set[int] = set()

    @property
    def idle(self) -> bool:
        """True when no mask needs the process."""
        current = None if self._current is None else self._current()
        return current is None and all(mask() is None for mask in self._waiting)

    def add(self, mask: TokenMask) -> None:
        """Queue a mask, unless it waits already or has its result."""
        queued = (self._current, *self._waiting)
        if mask.result is None and all(each is None or each() is not mask for each in queued):
            self._waiting.append(weakref.ref(mask))

    def advance(self, owner: GrammarMasks) -> None:
        """Receive results that have come, and request the next mask."""
        while self.child is not None:
            if self._current is not None:
                mask = self._current()
                if mask is None:  # its request has gone, and the work for it goes too
                    self.close()
                    return
                if not self._take(mask, self.child, owner):
                    return
                self._current = None
            following = self._next()
            if following is None or self.child is None:
                return
            self._begin(following, self.child)

    def close(self) -> None:
        """End the child; waiting masks stay queued."""
        if self.child is not None:
            self.child.close()
        self.child = None
        self._current = None
        self._served.clear()

    def _next(self) -> TokenMask | None:
        while self._waiting:
            mask = self._waiting.popleft()()
            if mask is not None and mask.result is None:
                return mask
        return None

    def _begin(self, mask: TokenMask, child: Child) -> None:
        following = mask.following
        if following.child is not child:
            following.child, following.n_followed = child, 0
        new = tuple(mask.tokens[following.n_followed :])
        request = AdvanceGrammar(mask.grammar, following.key, following.n_followed, new)
        self._current = weakref.ref(mask)
        self._served.add(following.key)
        child.begin(msgspec.msgpack.encode(request), cpu_s=_left_s(mask))

    def _take(self, mask: TokenMask, child: Child, owner: GrammarMasks) -> bool:
        """Receive the result of a mask; return False while it may still come."""
        following, before_s = mask.following, child.cpu_s
        try:
            answer = child.poll()
        except HandlerFailed as error:
            following.child = None
            mask.result = GrammarFailed(str(error), invalid=False)
            return True
        except LimitExceeded as error:
            self._exceeded(mask, error, owner)
            return True
        except ChildStalled as error:  # another process would not get more
            self.close()
            mask.result = _failed_for_now(error)
            return True
        except ChildUnavailable as error:
            self.close()
            self._retry(mask, _failed_for_now(error))
            return True
        if answer is None:
            return False
        following.spent_s += child.cpu_s - before_s
        reply = _decoder.decode(answer)
        if reply.outcome == "mask":
            following.n_followed = len(mask.tokens)
            owner.set_mask(mask, reply.mask)
        elif reply.outcome == "unknown":
            following.child = None
            self._waiting.appendleft(weakref.ref(mask))
        else:
            following.child = None
            mask.result = GrammarFailed(
                f"the grammar can't be followed: {reply.reason}", invalid=reply.outcome == "invalid"
            )
        return True

    def _exceeded(self, mask: TokenMask, error: LimitExceeded, owner: GrammarMasks) -> None:
        shared = self._served - {mask.following.key}
        self.close()
        why = GrammarFailed(f"the grammar can't be followed: {error}", invalid=True)
        mask.n_crashes += not (error.proven or shared)
        if error.limit != "time" and not mask.retried and (shared or not error.proven):
            # Remains of other answers in that process may have been the reason, or a signal.
            self._retry(mask, why)
            return
        log.warning("a grammar passed its limits: %s", error)
        mask.result = why
        if not mask.tokens and (error.proven or mask.n_crashes > 1):
            owner.remember_invalid(mask.grammar, why)

    def _retry(self, mask: TokenMask, why: GrammarFailed) -> None:
        """Queue a mask for a fresh process, once; after that its result is `why`."""
        if mask.retried:
            mask.result = why
        else:
            mask.retried = True
            self._waiting.appendleft(weakref.ref(mask))


def _failed_for_now(error: ChildUnavailable) -> GrammarFailed:
    """Return a failure that says nothing about the grammar: a later try may succeed."""
    return GrammarFailed(
        f"the grammar can't be followed now: {error}", invalid=False, retryable=True
    )


def _left_s(mask: TokenMask) -> float:
    """Return the processor seconds that a request may still take."""
    budget_s = MAX_GRAMMAR_CPU_S + MAX_GRAMMAR_TOKEN_CPU_S * len(mask.tokens)
    return max(0.01, budget_s - mask.following.spent_s)
