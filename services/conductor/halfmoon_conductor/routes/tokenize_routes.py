"""``/tokenize`` and ``/detokenize``: what the model makes of a text, in vLLM's shapes."""

from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute

from halfmoon_conductor.api.tokenize_models import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from halfmoon_conductor.inputs.input_processor import InputProcessor
from halfmoon_conductor.inputs.tokenize_bodies import detokenize_body, tokenize_body


def tokenizing_router(
    intake: InputProcessor, responses: dict[int | str, dict[str, Any]], route_class: type[APIRoute]
) -> APIRouter:
    """The two routes; `route_class` reads their bodies."""
    router = APIRouter(responses=responses, route_class=route_class)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """The tokens of a text, or of a conversation as the chat template writes it."""
        return tokenize_body(intake, body, here=True)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of tokens; special ones have none."""
        return detokenize_body(intake, body)

    return router
