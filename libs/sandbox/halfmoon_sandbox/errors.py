"""Define the errors of calls into a child process."""


class SandboxError(Exception):
    """Base of the sandbox's errors."""


class HandlerFailed(SandboxError):
    """The handler raised; the text is that of its exception. The child goes on."""


class LimitExceeded(SandboxError):
    """The request passed a limit or crashed its child, which has ended.

    Args:
        limit: "time", "memory" or "crash".
        detail: a sentence for logs and clients.
    """

    def __init__(self, limit: str, detail: str) -> None:
        super().__init__(detail)
        #: "time", "memory" or "crash".
        self.limit = limit


class ChildUnavailable(SandboxError):
    """No child can be had: the template process does not start, or this child was closed."""
