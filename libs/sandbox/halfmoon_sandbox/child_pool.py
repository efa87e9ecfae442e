"""Share the children of one sandbox between callers on an event loop.

Children are reused, and may keep memory of earlier requests. So a request that runs a used child
out of memory is sent once more to a fresh child. Only then it counts as the cause. A crash may have
a cause outside: a request has to crash two fresh children.
"""

import asyncio

from halfmoon_sandbox.child import Child
from halfmoon_sandbox.errors import ChildStalled, ChildUnavailable, LimitExceeded
from halfmoon_sandbox.sandbox import Sandbox

#: Requests after which a child is replaced by a fresh one.
_MAX_CALLS = 1000


class ChildPool:
    """As many children as there are calls at once; the caller bounds the calls.

    Args:
        sandbox: closed with this pool.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        #: Children without a request, each with its number of handled requests.
        self.idle: list[tuple[Child, int]] = []

    def start(self) -> None:
        """Begin to load the template, so that the first call need not wait for that."""
        self.sandbox.start()

    def close(self) -> None:
        """End all children, and the template."""
        for child, _ in self.idle:
            child.close()
        self.idle.clear()
        self.sandbox.close()

    async def call(self, request: bytes, *, cpu_s: float, reuse: bool = True) -> bytes:
        """Send a request to a child and await the answer. A cancelled call ends the child.

        Args:
            request: for the handler.
            cpu_s: processor seconds that it may take.
            reuse: whether another request may use the child afterwards.

        Raises:
            HandlerFailed: the handler raised.
            LimitExceeded: the request passed a limit, or crashed fresh children.
            ChildStalled: the child did not get enough processor time.
            ChildUnavailable: no child can be had, or fresh ones were ended from outside.
        """
        while self.idle:
            child, n_calls = self.idle.pop()
            try:
                return await self._call(child, n_calls, request, cpu_s, reuse)
            except ChildStalled:  # another one would not get more
                raise
            except ChildUnavailable:  # it ended with its template, which is started again
                continue
            except LimitExceeded as error:
                if error.limit == "time":
                    raise
        try:
            return await self._call(await self._fork(), 0, request, cpu_s, reuse)
        except ChildStalled:
            raise
        except ChildUnavailable:  # it was ended from outside, or the template was
            pass
        except LimitExceeded as error:
            if error.proven:
                raise
        return await self._call(await self._fork(), 0, request, cpu_s, reuse)

    async def _call(
        self, child: Child, n_calls: int, request: bytes, cpu_s: float, reuse: bool
    ) -> bytes:
        try:
            answer = await child.call_async(request, cpu_s=cpu_s)
        except BaseException:
            child.close()
            raise
        if reuse and n_calls + 1 < _MAX_CALLS:
            self.idle.append((child, n_calls + 1))
        else:
            child.close()
        return answer

    async def _fork(self) -> Child:
        """Fork a child, in a thread while the template loads."""
        if self.sandbox.started():
            return self.sandbox.fork()
        return await asyncio.to_thread(self.sandbox.fork)
