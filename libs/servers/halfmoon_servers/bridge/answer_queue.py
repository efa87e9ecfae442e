"""Send one port's answers in order; tokens that came together share a message."""

import asyncio
from collections import deque
from typing import NoReturn

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages import Message, Produced, TokensProduced
from halfmoon_runtime.channels.network import PeerId
from halfmoon_runtime.worker.conductor_connections import ConductorConnections

#: Tokens in one message.
_MAX_TOKENS = 10_000
_Entry = tuple[PeerId, Message | tuple[Produced, TokenScore | None]]


class AnswerQueue:
    """Queue answers without waiting; `run` sends them."""

    def __init__(self, conductors: ConductorConnections) -> None:
        self._conductors = conductors
        #: In the order of sending. A request has at most its own tokens in it.
        self._entries: deque[_Entry] = deque()
        self._woken = asyncio.Event()
        self._n_steps = 0

    def put(self, request_id: RequestId, message: Message) -> None:
        """Queue a message to the owner of a request; without an owner, do nothing."""
        peer = self._conductors.owners.owner_of(request_id)
        if peer is not None:
            self.put_to(peer, message)

    def put_to(self, peer: PeerId, message: Message) -> None:
        """Queue a message to a connection."""
        self._entries.append((peer, message))
        self._woken.set()

    def produce(self, produced: Produced, score: TokenScore | None) -> None:
        """Queue a token to the owner of its request."""
        peer = self._conductors.owners.owner_of(produced.request_id)
        if peer is not None:
            self._entries.append((peer, (produced, score)))
            self._woken.set()

    async def run(self) -> NoReturn:
        """Send until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._entries:
                peer, entry = self._entries.popleft()
                if isinstance(entry, Message):
                    await self._conductors.answer(peer, entry)
                else:
                    await self._send_tokens(peer, entry)

    async def _send_tokens(self, peer: PeerId, first: tuple[Produced, TokenScore | None]) -> None:
        """Send a token, with those that follow it for the same connection."""
        tokens = [first]
        seen = {first[0].request_id}
        while self._entries and len(tokens) < _MAX_TOKENS:
            other, entry = self._entries[0]
            # A step has one token of a request.
            if other != peer or isinstance(entry, Message) or entry[0].request_id in seen:
                break
            self._entries.popleft()
            seen.add(entry[0].request_id)
            tokens.append(entry)
        self._n_steps += 1
        message = TokensProduced(
            step=self._n_steps,
            produced=tuple(produced for produced, _ in tokens),
            scores=tuple(
                (produced.request_id, score) for produced, score in tokens if score is not None
            ),
        )
        await self._conductors.answer(peer, message)
