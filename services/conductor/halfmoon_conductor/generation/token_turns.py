"""Let tokens on to their clients one at a time while the event loop is late, tenants in turn.

Each token costs the conductor's loop time: its text, its event, its bytes. One tenant's flood must
not make all others' tokens late. A request whose tokens wait here for long stops being computed,
as one whose client does not read.
"""

import asyncio
from collections.abc import Callable

from halfmoon_conductor.fair_gate import FairGate
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_scheduling.fair_queueing import FairRoom

#: Seconds by which a loop that has time for all tokens is never late.
_LATE_S = 0.05
#: Tokens of a tenant that go before others' backlogs.
_CREDIT = 64
#: Candidates whose log probabilities cost as much as a token.
_CANDIDATES_PER_TOKEN = 5


class TokenTurns:
    """The turns of all streams of one conductor."""

    def __init__(self, late_s: Callable[[], float]) -> None:
        """Begin without streams.

        Args:
            late_s: returns the seconds by which the loop's latest wake-up was late.
        """
        self._late_s = late_s
        self._gate = FairGate(1, credit=_CREDIT)
        #: Streams by tenant: one tenant alone needs no turns.
        self.streams = FairRoom()

    async def wait(self, tenant: str, score: TokenScore | None) -> None:
        """Wait until it is a tenant's turn to send a token."""
        is_late = self._gate.is_full or self._late_s() > _LATE_S
        if not is_late or self.streams.n_tenants < 2:
            return
        n_candidates = 0 if score is None else len(score.top)
        async with self._gate.place(tenant, 1 + n_candidates / _CANDIDATES_PER_TOKEN):
            await asyncio.sleep(0)  # others' sockets and messages come between two tokens
