"""Routes of two more APIs for the same chats: Anthropic's Messages and OpenAI's Responses."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from halfmoon_conductor import anthropic_shapes
from halfmoon_conductor.anthropic_requests import CountTokensRequest, MessagesRequest
from halfmoon_conductor.anthropic_shapes import AnthropicMessage, MessagesShape, TokenCount
from halfmoon_conductor.asking import Asking
from halfmoon_conductor.front import Front, respond
from halfmoon_conductor.prepared import read_of
from halfmoon_conductor.responses_requests import ResponsesRequest
from halfmoon_conductor.responses_shapes import ResponseObject, ResponsesShape

Responses = dict[int | str, dict[str, Any]]


def messages_router(
    front: Front, generation: Responses, counting: Responses, route_class: type[APIRoute]
) -> APIRouter:
    """Anthropic's.

    Args:
        front: answers.
        generation: how a generating route may answer, for the schema.
        counting: how the other one may.
        route_class: reads their bodies.
    """
    router = APIRouter(route_class=route_class)

    @router.post("/v1/messages", response_model=AnthropicMessage, responses=generation)
    async def create_message(body: MessagesRequest, request: Request, asker: Asking) -> Response:
        """Answer a conversation, in Anthropic's shapes."""
        chat, read = body.as_chat(), read_of(request.scope)
        order = await front.intake.chat(chat, asker, read.prepared)
        shape = MessagesShape(front.answer(order, asker, read.began_s), body.model)
        return await respond(
            shape, stream=bool(body.stream), last_words=anthropic_shapes.error_event
        )

    @router.post("/v1/messages/count_tokens", responses=counting)
    async def count_tokens(body: CountTokensRequest) -> TokenCount:
        """How many tokens a conversation has."""
        front.intake.card(body.model)
        n_tokens = len(front.intake.conversation(body.as_chat(), here=True))
        return TokenCount(input_tokens=n_tokens)

    return router


def responses_router(front: Front, generation: Responses, route_class: type[APIRoute]) -> APIRouter:
    """OpenAI's newer one.

    Args:
        front: answers.
        generation: how its route may answer, for the schema.
        route_class: reads its bodies.
    """
    router = APIRouter(route_class=route_class)

    @router.post("/v1/responses", response_model=ResponseObject, responses=generation)
    async def create_response(body: ResponsesRequest, request: Request, asker: Asking) -> Response:
        """Answer an input. Nothing is stored: send the whole conversation each time."""
        chat, read = body.as_chat(), read_of(request.scope)
        order = await front.intake.chat(chat, asker, read.prepared)
        shape = ResponsesShape(front.answer(order, asker, read.began_s), body)
        return await respond(shape, stream=bool(body.stream), last_words=shape.error_event)

    return router
