"""Where a request's trace goes on: W3C Trace Context, as messages carry it."""

from typing import Annotated

import msgspec
from msgspec import Meta


class TraceContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """The span that the receiver's spans are children of (https://www.w3.org/TR/trace-context/).

    Only requests that are sampled carry one. Who makes no traces ignores it.
    """

    #: ``00-<trace id, 32 hex digits>-<span id, 16>-01``
    traceparent: Annotated[str, Meta(max_length=256)]
    #: What tracing systems add, as they wrote it.
    tracestate: Annotated[str, Meta(max_length=8192)] = ""
