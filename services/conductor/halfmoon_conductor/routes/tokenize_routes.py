"""Serve ``/tokenize`` and ``/detokenize``."""

from fastapi import APIRouter
from fastapi.routing import APIRoute

from halfmoon_conductor.api.tokenize_models import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from halfmoon_conductor.inputs.prompt_encoder import PromptEncoder
from halfmoon_conductor.inputs.tokenize_bodies import detokenize_body, tokenize_body
from halfmoon_conductor.routes.openapi_responses import OpenApiResponses


def tokenize_router(
    encoder: PromptEncoder,
    responses: OpenApiResponses,
    route_class: type[APIRoute],
) -> APIRouter:
    """Make the two routes.

    Args:
        encoder: tokenizes.
        responses: the error responses, for the schema.
        route_class: reads their bodies.
    """
    router = APIRouter(responses=responses, route_class=route_class)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """Return the tokens of a text, or of a conversation as the chat template writes it."""
        return tokenize_body(encoder, body, inline=True)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """Return the text of tokens; special tokens have none."""
        return detokenize_body(encoder, body)

    return router
