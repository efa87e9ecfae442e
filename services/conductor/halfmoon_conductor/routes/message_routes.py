"""Routes of two more APIs for the same chats: Anthropic's Messages and OpenAI's Responses."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from halfmoon_conductor.api.anthropic import anthropic_serializer
from halfmoon_conductor.api.anthropic.anthropic_requests import CountTokensRequest, MessagesRequest
from halfmoon_conductor.api.anthropic.anthropic_serializer import (
    AnthropicMessage,
    MessagesSerializer,
    TokenCount,
)
from halfmoon_conductor.api.responses.responses_requests import ResponsesRequest
from halfmoon_conductor.api.responses.responses_serializer import (
    ResponseObject,
    ResponsesSerializer,
)
from halfmoon_conductor.http_server.request_context import RequestContextDependency
from halfmoon_conductor.inputs.preparation_messages import read_body_of
from halfmoon_conductor.routes.generation_handler import GenerationHandler, send_response

Responses = dict[int | str, dict[str, Any]]


def messages_router(
    front: GenerationHandler,
    generation: Responses,
    counting: Responses,
    route_class: type[APIRoute],
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
    async def create_message(
        body: MessagesRequest, request: Request, asker: RequestContextDependency
    ) -> Response:
        """Answer a conversation, in Anthropic's shapes."""
        chat, read = body.as_chat(), read_body_of(request.scope)
        order = await front.intake.chat(chat, asker, read.prepared)
        shape = MessagesSerializer(front.answer(order, asker, read.began_s), body.model)
        return await send_response(
            shape, stream=bool(body.stream), last_words=anthropic_serializer.anthropic_error_event
        )

    @router.post("/v1/messages/count_tokens", responses=counting)
    async def count_tokens(body: CountTokensRequest) -> TokenCount:
        """How many tokens a conversation has."""
        front.intake.card(body.model)
        n_tokens = len(front.intake.conversation(body.as_chat(), here=True))
        return TokenCount(input_tokens=n_tokens)

    return router


def responses_router(
    front: GenerationHandler, generation: Responses, route_class: type[APIRoute]
) -> APIRouter:
    """OpenAI's newer one.

    Args:
        front: answers.
        generation: how its route may answer, for the schema.
        route_class: reads its bodies.
    """
    router = APIRouter(route_class=route_class)

    @router.post("/v1/responses", response_model=ResponseObject, responses=generation)
    async def create_response(
        body: ResponsesRequest, request: Request, asker: RequestContextDependency
    ) -> Response:
        """Answer an input. Nothing is stored: send the whole conversation each time."""
        chat, read = body.as_chat(), read_body_of(request.scope)
        order = await front.intake.chat(chat, asker, read.prepared)
        shape = ResponsesSerializer(front.answer(order, asker, read.began_s), body)
        return await send_response(shape, stream=bool(body.stream), last_words=shape.error_event)

    return router
