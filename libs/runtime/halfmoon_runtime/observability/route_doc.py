"""Describe a route for operators: what it takes and answers, for its OpenAPI document.

Types are msgspec's. The summary is the docstring of the handler.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RouteDoc:
    """Parameters, body, answer and errors of one route."""

    #: Types of the named parts of the path.
    parts: Mapping[str, Any] = field(default_factory=dict)
    #: Types of the query's parameters, all of them optional. Others are refused.
    query: Mapping[str, Any] = field(default_factory=dict)
    #: Type of the JSON body of a POST; None: there is none.
    body: Any = None
    body_is_required: bool = True
    #: Type of the JSON answer with status 200.
    answer: Any = object
    #: What each further status of the route's own means.
    errors: Mapping[int, str] = field(default_factory=dict)
