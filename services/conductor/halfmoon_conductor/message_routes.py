"""Routes of two more APIs for the same chats: Anthropic's Messages and OpenAI's Responses."""

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from halfmoon_conductor import anthropic_shapes
from halfmoon_conductor.anthropic_requests import CountTokensRequest, MessagesRequest
from halfmoon_conductor.anthropic_shapes import AnthropicMessage, MessagesShape, TokenCount
from halfmoon_conductor.asking import Asking
from halfmoon_conductor.front import Front, respond
from halfmoon_conductor.responses_requests import ResponsesRequest
from halfmoon_conductor.responses_shapes import ResponseObject, ResponsesShape

Responses = dict[int | str, dict[str, Any]]


def messages_router(front: Front, generation: Responses, counting: Responses) -> APIRouter:
    """Anthropic's.

    Args:
        front: answers.
        generation: how a generating route may answer, for the schema.
        counting: how the other one may.
    """
    router = APIRouter()

    @router.post("/v1/messages", response_model=AnthropicMessage, responses=generation)
    async def create_message(body: MessagesRequest, request: Request, asker: Asking) -> Response:
        """Answer a conversation, in Anthropic's shapes."""
        began_s = time.perf_counter()
        chat = body.as_chat()
        order = await front.intake.chat(chat, asker)
        shape = MessagesShape(front.answer(order, asker, began_s), body.model)
        return await respond(
            shape, request, stream=bool(body.stream), last_words=anthropic_shapes.error_event
        )

    @router.post("/v1/messages/count_tokens", responses=counting)
    async def count_tokens(body: CountTokensRequest) -> TokenCount:
        """How many tokens a conversation has."""
        front.intake.card(body.model)
        return TokenCount(input_tokens=len(await front.intake.encode_chat(body.as_chat())))

    return router


def responses_router(front: Front, generation: Responses) -> APIRouter:
    """OpenAI's newer one.

    Args:
        front: answers.
        generation: how its route may answer, for the schema.
    """
    router = APIRouter()

    @router.post("/v1/responses", response_model=ResponseObject, responses=generation)
    async def create_response(body: ResponsesRequest, request: Request, asker: Asking) -> Response:
        """Answer an input. Nothing is stored: send the whole conversation each time."""
        began_s = time.perf_counter()
        chat = body.as_chat()
        order = await front.intake.chat(chat, asker)
        shape = ResponsesShape(front.answer(order, asker, began_s), body)
        return await respond(shape, request, stream=bool(body.stream), last_words=shape.error_event)

    return router
