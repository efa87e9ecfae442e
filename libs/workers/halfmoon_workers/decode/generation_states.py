"""Hold what running requests need besides their pages: sampling, and the tokens so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from halfmoon_engine.interface import Draw, PendingToken, Run, SequenceState
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages import StartDecode
from halfmoon_protocol.sampling import Sampling
from halfmoon_scheduling.decode.decode_batch import BatchStep


@dataclass
class _Generation:
    sampling: Sampling
    n_prompt: int
    #: All tokens so far, kept only when sampling depends on them.
    history: list[int] | None
    #: Whether a step has run: since then this engine alone has written its pages.
    stepped: bool = False
    #: Score of the newest token, if requested, until `take_scores`.
    scores: list[TokenScore] = field(default_factory=list)
    scratch: SequenceState = field(default_factory=SequenceState)
    #: Its next token, while the token's grammar mask is late.
    late: PendingToken | None = None


class GenerationStates:
    """Hold one state for each running request of a decode batch."""

    def __init__(self) -> None:
        self._running: dict[RequestId, _Generation] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._running

    def start(self, start: StartDecode) -> None:
        """Add a request, which runs from its first token on."""
        history = [*start.history, start.first_token] if start.sampling.needs_history else None
        self._running[start.request_id] = _Generation(start.sampling, start.n_prompt, history)

    def remove(self, request_id: RequestId) -> None:
        """Remove a request, if it is here."""
        self._running.pop(request_id, None)

    def runs_of(self, step: BatchStep, *, again: bool = False) -> list[Run]:
        """Return the runs that the engine computes in a step, which counts as taken then.

        Args:
            step: of requests that run.
            again: after a forward pass of the same step that failed at any point.
        """
        runs: list[Run] = []
        for row in step.rows:
            generation = self._running[row.request_id]
            if again:
                generation.scores.clear()
                generation.stepped = False
            draw = Draw(
                generation.sampling,
                generation.history or (),
                generation.n_prompt,
                generation.scores.extend,
                generation.scratch,
                row.masked,
            )
            runs.append(
                Run((row.token,), row.position, row.pages, draw, continues=generation.stepped)
            )
            generation.stepped = True
        return runs

    @property
    def late(self) -> dict[RequestId, PendingToken]:
        """Next tokens that are late, by request."""
        return {request_id: g.late for request_id, g in self._running.items() if g.late is not None}

    def hold(self, request_id: RequestId, late: PendingToken) -> None:
        """Keep a request's next token, which is late."""
        self._running[request_id].late = late

    def add(self, request_id: RequestId, token: int) -> None:
        """Record a request's next token."""
        generation = self._running[request_id]
        generation.late = None
        if generation.history is not None:
            generation.history.append(token)

    def take_scores(
        self, request_ids: Sequence[RequestId]
    ) -> tuple[tuple[RequestId, TokenScore], ...]:
        """Remove and return the scores of these requests' newest tokens."""
        return tuple(
            (request_id, scores.pop())
            for request_id in request_ids
            if (scores := self._running[request_id].scores)
        )
