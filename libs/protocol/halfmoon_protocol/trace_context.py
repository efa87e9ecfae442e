"""Carry a request's trace context in messages, in the form of W3C Trace Context."""

from typing import Annotated

import msgspec
from msgspec import Meta


class TraceContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """The span that the receiver's spans are children of (https://www.w3.org/TR/trace-context/).

    Only requests that are sampled carry one. Who makes no traces ignores it.
    """

    #: ``00-<trace id, 32 hex digits>-<span id, 16>-01``
    traceparent: Annotated[str, Meta(max_length=256)]
    #: Additions of tracing systems, unchanged.
    tracestate: Annotated[str, Meta(max_length=8192)] = ""
