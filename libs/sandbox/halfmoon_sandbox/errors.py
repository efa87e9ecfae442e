"""Define the errors of calls into a child process.

SandboxError
├── HandlerFailed      the handler raised; the same request fails again
├── LimitExceeded      the request passed a limit or crashed its child; the same happens again
└── ChildUnavailable   no child can be had now; nothing is said about the request
    ├── LoadFailed     its template can't load the handler, and never will
    ├── ChildLost      the child was ended from outside
    └── ChildStalled   the child had too little processor time to answer
"""


class SandboxError(Exception):
    """Base of the sandbox's errors."""


class HandlerFailed(SandboxError):
    """The handler raised; the text is that of its exception. The child goes on."""


class LimitExceeded(SandboxError):
    """The request passed a limit or crashed its child, which has ended.

    Args:
        limit: "time", "memory" or "crash".
        detail: a sentence for logs and clients.
        proven: see the attribute.
    """

    def __init__(self, limit: str, detail: str, *, proven: bool = True) -> None:
        super().__init__(detail)
        #: "time", "memory" or "crash".
        self.limit = limit
        #: True when the child's own limit ended it. False after a crash: a signal of that kind may
        #: come from outside too, so the request is the cause only if it happens again.
        self.proven = proven


class ChildUnavailable(SandboxError):
    """No child can be had: the template process does not start, or this child was closed."""


class LoadFailed(ChildUnavailable):
    """A template process can't load its handler; the same happens again.

    Args:
        detail: a sentence for logs.
        limit: "time", "memory" or "crash"; empty: the handler's factory raised.
    """

    def __init__(self, detail: str, limit: str = "") -> None:
        super().__init__(f"the template process does not start: {detail}")
        self.detail, self.limit = detail, limit


class ChildLost(ChildUnavailable):
    """A child was ended from outside: by an operator, or by the kernel, which lacked memory."""


class ChildStalled(ChildUnavailable):
    """A child did not answer in time, and had not used up its processor time either."""
