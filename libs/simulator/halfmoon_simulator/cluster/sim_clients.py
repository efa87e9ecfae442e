"""The clients of a simulated cluster: their requests, tries, and what they got.

What the live gateway does, without its streams: each try has an id of its own, tokens that
were delivered are kept, and the next try goes on from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfmoon_protocol.ids import BlockHash, RequestId, original_request_id, retry_id
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_scheduling.commands import Deliver, Reject
from halfmoon_scheduling.events import Request, RequestArrived
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.sim_prefill import FIRST_TOKEN_ID, STOP_TOKEN_ID
from halfmoon_simulator.results.run_results import SimRequestRecord
from halfmoon_simulator.results.token_intervals import TokenIntervals
from halfmoon_simulator.workloads.traces import TraceRequest, with_sessions

_GREEDY = Sampling(temperature=0.0)


@dataclass(eq=False, slots=True)
class _Stream:
    """One request that is not over."""

    asked: TraceRequest
    record: SimRequestRecord
    #: Tokens that the client had when the try under way began.
    n_before: int = 0
    #: Tries in a row before this one that brought none.
    fruitless: int = 0
    #: Whether a prefill was computed for it.
    prefilled: bool = False
    #: When the client got its newest token.
    last_token_s: float = 0.0

    @property
    def current(self) -> RequestId:
        """The id of the try under way."""
        first = RequestId(f"r{self.record.index}")
        return first if self.record.attempts <= 1 else retry_id(first, self.record.attempts)


class SimClients:
    """Sends a workload's requests and keeps a record of each."""

    def __init__(
        self,
        workload: Sequence[TraceRequest],
        event_queue: EventQueue,
        post: Callable[[RequestArrived], None],
        *,
        block_tokens: int,
        max_new_tokens: int,
    ) -> None:
        """Put the arrivals on the event queue.

        Args:
            workload: in order of time; later turns of a session follow their first one.
            event_queue: the clock.
            post: takes an arrival to the conductor.
            block_tokens: tokens per block, which is what the workload's ids stand for.
            max_new_tokens: what each client allows; its answer's length is unknown to it.
        """
        self._workload = workload
        self._event_queue = event_queue
        self._post = post
        self._block_tokens = block_tokens
        self._max_new_tokens = max_new_tokens
        self._hashes: dict[int, BlockHash] = {}
        #: In order of arrival.
        self.records: list[SimRequestRecord] = []
        #: By the origin of their tries' ids.
        self._streams: dict[str, _Stream] = {}
        #: Indices of the turns to come of each session, the next one last.
        self._turns: dict[str, list[int]] = {}
        #: Turns of each session that have arrived.
        self._n_turns: dict[str, int] = {}
        self.n_over = 0
        self.n_rejected = 0
        for index, (request, goes_on) in enumerate(with_sessions(workload)):
            if goes_on is not None:
                self._turns.setdefault(goes_on, []).insert(0, index)
            else:
                event_queue.at(request.at_s, self._arrive, index)

    @property
    def all_over(self) -> bool:
        """Return whether every request of the workload has ended."""
        return self.n_over == len(self._workload)

    @property
    def n_asked(self) -> int:
        """Requests of the workload."""
        return len(self._workload)

    @property
    def n_live(self) -> int:
        """Requests that arrived and have not ended."""
        return len(self._streams)

    def n_output(self, request_id: RequestId) -> int:
        """Return how many tokens this try will get in all."""
        stream = self._streams.get(original_request_id(request_id))
        return 1 if stream is None else stream.record.n_output - stream.n_before

    def chain_of(self, request_id: RequestId) -> tuple[BlockHash, ...]:
        """Return the blocks of a request's prompt and answer of which all KV is computed.

        They are those of its session's next turn; empty if none is to come, or if that turn does
        not begin with prompt and answer. The last token of an answer is never run.
        """
        stream = self._streams.get(original_request_id(request_id))
        turns = None if stream is None else self._turns.get(stream.asked.session or "")
        if stream is None or not turns:
            return ()
        asked, following = stream.asked, self._workload[turns[-1]]
        n_said, n_own = asked.n_input + asked.n_output, asked.n_input // self._block_tokens
        if following.n_input < n_said or following.blocks[:n_own] != asked.blocks[:n_own]:
            return ()
        return self._block_hashes(following)[: (n_said - 1) // self._block_tokens]

    # -- tries -------------------------------------------------------------------------------

    def _arrive(self, index: int) -> None:
        asked = self._workload[index]
        record = SimRequestRecord(
            index,
            self._event_queue.now,
            asked.n_input,
            asked.n_output,
            ttft_slo_s=asked.ttft_slo_s,
            turn=self._n_turns.get(asked.session or "", 0),
        )
        if asked.session is not None:
            self._n_turns[asked.session] = record.turn + 1
        self.records.append(record)
        stream = self._streams[f"r{index}"] = _Stream(asked, record)
        self._try(stream)

    def _try(self, stream: _Stream) -> None:
        record, asked = stream.record, stream.asked
        if record.attempts:
            stream.fruitless = 0 if record.n_out > stream.n_before else stream.fruitless + 1
        record.attempts += 1
        stream.n_before = record.n_out
        limit = max(self._max_new_tokens, record.n_output)
        request = Request(
            request_id=stream.current,
            token_ids=(FIRST_TOKEN_ID,) * (record.n_input + record.n_out),
            n_prompt=record.n_input,
            block_hashes=self._block_hashes(asked),
            sampling=_GREEDY,
            stopping=Stopping(max_new_tokens=limit - record.n_out, stop_token_ids=(STOP_TOKEN_ID,)),
            attempt=record.attempts,
            fruitless=stream.fruitless,
            priority=asked.priority,
            ttft_slo_s=asked.ttft_slo_s,
        )
        self._post(RequestArrived(request))

    def _block_hashes(self, asked: TraceRequest) -> tuple[BlockHash, ...]:
        """Of full blocks only: a partial one has no hash."""
        known = self._hashes
        for block in asked.blocks:
            if block not in known:
                known[block] = BlockHash(block.to_bytes(16, "big"))
        return tuple(known[block] for block in asked.blocks[: asked.n_input // self._block_tokens])

    # -- what they get -----------------------------------------------------------------------

    def placed(self, request_id: RequestId, prefill: str, decode: str) -> None:
        """Take note of the workers that a try goes to."""
        if (stream := self._current(request_id)) is not None:
            stream.record.prefill, stream.record.decode = prefill, decode

    def explain(self, request_id: RequestId, why: str) -> None:
        """Record why the conductor placed a try where it did, or did not place it."""
        if (stream := self._current(request_id)) is not None:
            stream.record.why = why

    def prefilled(self, request_id: RequestId) -> None:
        """Take note that a try's prefill was computed."""
        if (stream := self._current(request_id)) is not None:
            stream.prefilled = True

    def deliver(self, command: Deliver) -> None:
        """Take a try's first token."""
        stream = self._current(command.request_id)
        if stream is None:
            return
        record, now = stream.record, self._event_queue.now
        if record.first_token_s is None:
            record.first_token_s = now
            record.n_cached = command.n_cached
        else:
            record.intervals = record.intervals.then(now - stream.last_token_s, TokenIntervals())
        record.n_out += 1
        stream.last_token_s = now
        if command.finish:
            self._end(stream, "finished", "")

    def decoded(self, request_id: RequestId, n_tokens: int, intervals: TokenIntervals) -> None:
        """Decode produced tokens up to so many of this try, the first one included."""
        if (stream := self._current(request_id)) is None:
            return
        record = stream.record
        record.n_out = stream.n_before + n_tokens
        record.intervals = TokenIntervals((*record.intervals.runs, *intervals.runs))
        stream.last_token_s = self._event_queue.now
        if record.n_out == record.n_output:
            self._end(stream, "finished", "")

    def reject(self, command: Reject) -> None:
        """Take a refusal: it wastes the prefill if that was computed."""
        if (stream := self._current(command.request_id)) is not None:
            self._end(stream, "wasted" if stream.prefilled else "rejected", command.kind)

    def fail(self, request_id: RequestId, reason: str) -> None:
        """Take an error after which no try follows."""
        if (stream := self._current(request_id)) is not None:
            self._end(stream, "failed", reason)

    def resubmit(self, request_id: RequestId) -> None:
        """Start the next try."""
        if (stream := self._current(request_id)) is not None:
            self._try(stream)

    def _current(self, request_id: RequestId) -> _Stream | None:
        stream = self._streams.get(original_request_id(request_id))
        return stream if stream is not None and stream.current == request_id else None

    def _end(self, stream: _Stream, outcome: str, reason: str) -> None:
        record = stream.record
        assert not record.outcome, "a request ends once"
        record.outcome, record.reason, record.ended_s = outcome, reason, self._event_queue.now
        self.n_over += 1
        self.n_rejected += outcome in ("rejected", "wasted")
        del self._streams[f"r{record.index}"]
        session = stream.asked.session
        if session is not None and (turns := self._turns.get(session)):
            index = turns.pop()
            self._event_queue.after(self._workload[index].at_s, self._arrive, index)

    def check(self) -> None:
        """Audit: every request that arrived is under way or has ended."""
        assert len(self.records) == self.n_over + len(self._streams)
        assert all(bool(r.outcome) == (r.ended_s is not None) for r in self.records)
        for record in self.records:
            assert record.n_out <= record.n_output
            assert record.outcome != "finished" or record.n_out == record.n_output
