"""Check grammars in child processes with limits, before any worker is involved."""

import sys
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
from halfmoon_conductor.fair_gate import FairGate
from halfmoon_conductor.grammar.grammar_check_handler import (
    CheckArgument,
    CheckGrammar,
    GrammarChecked,
)
from halfmoon_conductor.grammar.grammars import RequestedGrammar
from halfmoon_conductor.text.tokenizer_interface import Tokenizer
from halfmoon_protocol.sampling import MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_CPU_S
from halfmoon_sandbox import ChildPool, ChildUnavailable, HandlerFailed, LimitExceeded, Sandbox
from halfmoon_scheduling.fair_queueing import FairRoom

log = structlog.get_logger()

#: Checks that run at once, those of one tenant, and those of all that may wait.
_MAX_RUNNING = 3
_MAX_OF_ONE = 2
_MAX_WAITING = 64
_RETRY_S = 1.0
#: Results that are remembered, the last used ones, and their bytes.
_MAX_REMEMBERED = 2048
_MAX_REMEMBERED_BYTES = 64 * 1024 * 1024
_MEMORY_BYTES = 512 * 1024 * 1024

#: A grammar, and whether its client wrote it.
_Key = tuple[str, bool]
_decoder = msgspec.msgpack.Decoder(GrammarChecked)


class GrammarChecker:
    """Check clients' grammars and remember the results. Tenants take turns.

    What a check takes is unknown before, up to seconds. So one tenant never has all places, and
    the places that come free go to tenants in turn.

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
        self._remembered: OrderedDict[_Key, GrammarChecked] = OrderedDict()
        self._n_remembered_bytes = 0
        self._places = FairGate(_MAX_RUNNING, credit=_MAX_RUNNING)
        #: Places of each tenant with checks that run or wait.
        self._own_places: dict[str, FairGate] = {}
        #: Checks that run or wait.
        self._room = FairRoom()
        self._n_checks = 0
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

    async def check(self, requested: RequestedGrammar, tenant: str = "") -> str:
        """Return the grammar in Lark, known to compile within its limits of time and memory.

        Args:
            requested: the grammar, and the field that it comes from.
            tenant: name of its tenant; empty for none.

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
            checked = await self._checked(CheckGrammar(*key), tenant)
            self._remember(key, checked)
        else:
            self._remembered.move_to_end(key)
        if checked.problem:
            raise UnusableGrammar(f"{requested.param} {checked.problem}.", param=requested.param)
        return checked.grammar

    def _remember(self, key: _Key, checked: GrammarChecked) -> None:
        """Keep a result, in place of those that were used least lately."""
        if key not in self._remembered:
            self._n_remembered_bytes += _size(key, checked)
        self._remembered[key] = checked
        while (
            len(self._remembered) > _MAX_REMEMBERED
            or self._n_remembered_bytes > _MAX_REMEMBERED_BYTES
        ):
            self._n_remembered_bytes -= _size(*self._remembered.popitem(last=False))

    async def _checked(self, check: CheckGrammar, tenant: str) -> GrammarChecked:
        """Check a grammar in its tenant's turn.

        Raises:
            ServerOverloaded: too many wait, and the tenant has more than its share of them.
        """
        self._room.enter(tenant)
        self._n_checks += 1
        own_places = self._own_places.setdefault(tenant, FairGate(_MAX_OF_ONE, credit=0))
        try:
            most = _MAX_RUNNING + _MAX_WAITING
            if self._n_checks > most and not self._room.is_within_share(tenant, most):
                raise ServerOverloaded(
                    f"{self._n_checks - 1} grammars are checked or wait for it, the most that may.",
                    _RETRY_S,
                )
            async with own_places.place("", 1), self._places.place(tenant, 1):
                return await self._result_of(check)
        finally:
            self._n_checks -= 1
            self._room.leave(tenant)
            if not self._room.holds(tenant):
                del self._own_places[tenant]

    async def _result_of(self, check: CheckGrammar) -> GrammarChecked:
        """Check a grammar; only what is due to the grammar itself becomes a result."""
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
        return _decoder.decode(answer)


def _size(key: _Key, checked: GrammarChecked) -> int:
    return sys.getsizeof(key[0]) + sys.getsizeof(checked.grammar) + sys.getsizeof(checked.problem)
