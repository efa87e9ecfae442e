"""Check grammars in child processes with limits, before any worker is involved."""

import asyncio
import weakref
from collections import OrderedDict
from typing import Self

import msgspec
import structlog

from halfmoon_conductor.errors import (
    GenerationFailed,
    InvalidRequest,
    ServerOverloaded,
    ServiceUnavailable,
    UnusableGrammar,
)
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

#: Checks that run at once, and checks that may wait.
_MAX_RUNNING = 2
_MAX_WAITING = 64
_RETRY_S = 1.0
#: Results that are remembered, the last used ones.
_MAX_REMEMBERED = 2048
_MEMORY_BYTES = 512 * 1024 * 1024

_decoder = msgspec.msgpack.Decoder(GrammarChecked)


class GrammarChecker:
    """Check clients' grammars and remember the results.

    Args:
        argument: settings of the child processes.
    """

    def __init__(self, argument: CheckArgument) -> None:
        sandbox = Sandbox(
            "halfmoon_conductor.grammar.grammar_check_handler:make_handler",
            msgspec.msgpack.encode(argument),
            memory_bytes=_MEMORY_BYTES,
        )
        self._pool = ChildPool(sandbox)
        self._remembered: OrderedDict[tuple[str, bool], GrammarChecked] = OrderedDict()
        self._slots = asyncio.Semaphore(_MAX_RUNNING)
        self._n_waiting = 0
        weakref.finalize(self, sandbox.close)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Return a checker for a model's tokenizer."""
        return cls(
            CheckArgument(tokenizer.definition, tokenizer.vocab_size, tokenizer.eos_token_ids)
        )

    def start(self) -> None:
        """Start the template process, so that the first request need not wait for it."""
        self._pool.start()

    def close(self) -> None:
        """End all child processes."""
        self._pool.close()

    async def check(self, requested: RequestedGrammar) -> str:
        """Return the grammar in Lark, known to compile within its limits of time and memory.

        Raises:
            InvalidRequest: it is too large.
            UnusableGrammar: it does not compile, is too costly, or leads where no answer ends.
            ServerOverloaded: too many checks wait.
            ServiceUnavailable: no child process can be started, or those that were got killed.
        """
        if len(requested.grammar) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidRequest(
                f"{requested.param} makes a grammar of {len(requested.grammar)} characters, over "
                f"the {MAX_GRAMMAR_CHARACTERS} that one may have.",
                param=requested.param,
            )
        key = (requested.grammar, requested.from_client)
        checked = self._remembered.get(key)
        if checked is None:
            checked = self._remembered[key] = await self._checked(CheckGrammar(*key))
            if len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.popitem(last=False)
        self._remembered.move_to_end(key)
        if checked.problem:
            raise UnusableGrammar(f"{requested.param} {checked.problem}.", param=requested.param)
        return checked.grammar

    async def _checked(self, check: CheckGrammar) -> GrammarChecked:
        """Check a grammar; only what is due to the grammar itself becomes a result."""
        if self._n_waiting >= _MAX_WAITING:
            raise ServerOverloaded(
                f"{self._n_waiting} grammars wait to be checked, the most that may.", _RETRY_S
            )
        self._n_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._n_waiting -= 1
        try:
            answer = await self._pool.call(msgspec.msgpack.encode(check), cpu_s=MAX_GRAMMAR_CPU_S)
        except LimitExceeded as error:
            log.warning("grammar_refused", reason=str(error), limit=error.limit)
            return GrammarChecked(
                problem=f"can't be used: to check it, {error}; make it simpler, with fewer "
                "references, repetitions and large numbers"
            )
        except HandlerFailed as error:
            log.error("grammar_not_checked", reason=str(error))
            raise GenerationFailed("The check of the grammar failed.") from error
        except ChildUnavailable as error:
            log.error("grammar_not_checked", reason=str(error))
            raise ServiceUnavailable(
                f"The grammar can't be checked now: {error}.", _RETRY_S
            ) from error
        finally:
            self._slots.release()
        return _decoder.decode(answer)
