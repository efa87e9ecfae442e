"""Share template processes between tests: each costs an interpreter and a second of imports."""

from collections import OrderedDict
from typing import Any

from halfmoon_sandbox import Child, ChildUnavailable, Sandbox


class SharedSandboxes:
    """The template processes of sandboxes, one for all that are made alike. Close it."""

    def __init__(self, most: int = 4) -> None:
        """Keep so many template processes between tests, those that were used last."""
        self._most = most
        self._kept: OrderedDict[object, Sandbox] = OrderedDict()

    def borrow(self, factory: str, argument: bytes = b"", **options: Any) -> "BorrowedSandbox":
        """Return what a `Sandbox` of these arguments is."""
        key = factory, argument, *sorted(options.items())
        if key not in self._kept:
            self._kept[key] = Sandbox(factory, argument, **options)
        self._kept.move_to_end(key)
        return BorrowedSandbox(self._kept[key])

    def trim(self) -> None:
        """End the template processes over the limit, when no test runs."""
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)[1].close()

    def close(self) -> None:
        """End all template processes."""
        self._most = 0
        self.trim()


class BorrowedSandbox:
    """A sandbox whose template process stays when it is closed; its own children end."""

    def __init__(self, lender: Sandbox) -> None:
        self._lender = lender
        self._numbers: list[int] = []
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the template; None while it does not run."""
        return self._lender.pid

    def start(self) -> None:
        """Start the template, unless it runs."""
        self._open().start()

    def started(self) -> bool:
        """Start the template, and return whether it has loaded its handler."""
        return self._open().started()

    def fork(self) -> Child:
        """Fork a child, which ends with this sandbox."""
        child = self._open().fork()
        self._numbers.append(child._number)
        if self._closed:  # meanwhile, by another thread
            self.close()
        return child

    def close(self) -> None:
        """End the children that were forked here, as the end of a template does."""
        self._closed = True
        while self._numbers:
            self._lender.kill(self._numbers.pop())

    def _open(self) -> Sandbox:
        if self._closed:
            raise ChildUnavailable("the sandbox is closed")
        return self._lender
