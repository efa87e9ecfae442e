"""Serve ``/tokenize`` and ``/detokenize``."""

from fastapi import APIRouter
from fastapi.routing import APIRoute

from halfmoon_conductor.api.tokenize_models import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from halfmoon_conductor.routes.generation_route import AnsweredByPreparer
from halfmoon_conductor.routes.openapi_responses import OpenApiResponses


def tokenize_router(responses: OpenApiResponses, route_class: type[APIRoute]) -> APIRouter:
    """Make the two routes.

    Args:
        responses: the error responses, for the schema.
        route_class: reads their bodies.
    """
    router = APIRouter(responses=responses, route_class=route_class)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """Return the tokens of a text, or of a conversation as the chat template writes it."""
        raise AnsweredByPreparer

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """Return the text of tokens; special tokens have none."""
        raise AnsweredByPreparer

    return router
