"""Checking grammars before anything is spent, in child processes with limits."""

import asyncio
import weakref
from collections import OrderedDict
from typing import Self

import msgspec
import structlog

from halfmoon_conductor.errors import InvalidRequest, ServerOverloaded, ServiceUnavailable
from halfmoon_conductor.grammar.grammar_check_handler import (
    CheckArgument,
    CheckGrammar,
    GrammarChecked,
)
from halfmoon_conductor.grammar.grammars import RequestedGrammar
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_protocol.sampling import MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_CPU_S
from halfmoon_sandbox import ChildPool, ChildUnavailable, HandlerFailed, LimitExceeded, Sandbox

log = structlog.get_logger()

#: Checks at once, and those that may wait for their turn.
_MAX_RUNNING = 2
_MAX_WAITING = 64
_RETRY_S = 1.0
#: Outcomes that are remembered, the last used ones.
_MAX_REMEMBERED = 2048
_MEMORY_BYTES = 512 * 1024 * 1024

_decoder = msgspec.msgpack.Decoder(GrammarChecked)


class GrammarChecker:
    """Checks wishes of clients, and remembers what came out.

    Args:
        argument: of the child processes.
    """

    def __init__(self, argument: CheckArgument) -> None:
        sandbox = Sandbox(
            "halfmoon_conductor.grammar.grammar_check_handler:make_handler",
            msgspec.msgpack.encode(argument),
            memory_bytes=_MEMORY_BYTES,
        )
        self._pool = ChildPool(sandbox)
        self._remembered: OrderedDict[tuple[str, bool], GrammarChecked] = OrderedDict()
        self._turn = asyncio.Semaphore(_MAX_RUNNING)
        self._n_waiting = 0
        weakref.finalize(self, sandbox.close)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """A checker for a model's tokenizer."""
        return cls(
            CheckArgument(tokenizer.definition, tokenizer.vocab_size, tokenizer.eos_token_ids)
        )

    def start(self) -> None:
        """Begin to load the template, so that the first request need not wait for that."""
        self._pool.start()

    def close(self) -> None:
        """End all child processes."""
        self._pool.close()

    async def check(self, wanted: RequestedGrammar) -> str:
        """The grammar in Lark, known to compile within its budget of time and memory.

        Raises:
            InvalidRequest: it does not compile, is too large or takes too much; it says which.
            Overloaded: too many checks wait.
            Unavailable: no process can be started to check it.
        """
        if len(wanted.grammar) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                f"{wanted.param} makes a grammar of {len(wanted.grammar)} characters, over the "
                f"{MAX_GRAMMAR_CHARACTERS} that one may have.",
                param=wanted.param,
            )
        key = (wanted.grammar, wanted.own)
        checked = self._remembered.get(key)
        if checked is None:
            checked = self._remembered[key] = await self._checked(CheckGrammar(*key))
            if len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        self._remembered.move_to_end(key)
        if checked.problem:
            raise InvalidRequest(f"{wanted.param} {checked.problem}", param=wanted.param)
        return checked.grammar

    async def _checked(self, asked: CheckGrammar) -> GrammarChecked:
        if self._n_waiting >= _MAX_WAITING:
            raise ServerOverloaded(
                f"{self._n_waiting} grammars wait to be checked, the most that may.", _RETRY_S
            )
        self._n_waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._n_waiting -= 1
        try:
            answer = await self._pool.call(msgspec.msgpack.encode(asked), cpu_s=MAX_GRAMMAR_CPU_S)
        except LimitExceeded as error:
            log.warning("grammar_refused", reason=str(error), limit=error.limit)
            return GrammarChecked(
                problem=f"can't be used: to check it, {error}; make it simpler, with fewer "
                "references, repetitions and large numbers"
            )
        except HandlerFailed as error:
            return GrammarChecked(problem=f"can't be used: {error}")
        except ChildUnavailable as error:
            log.error("grammar_not_checked", reason=str(error))
            raise ServiceUnavailable("Grammars can't be checked now.", _RETRY_S) from error
        finally:
            self._turn.release()
        return _decoder.decode(answer)
