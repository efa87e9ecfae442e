"""Serve two more APIs for chats: Anthropic's Messages and OpenAI's Responses."""

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from halfmoon_conductor.api.anthropic.anthropic_objects import AnthropicMessage, TokenCount
from halfmoon_conductor.api.anthropic.anthropic_requests import CountTokensRequest, MessagesRequest
from halfmoon_conductor.api.anthropic.anthropic_serializer import (
    MessagesSerializer,
    anthropic_error_event,
)
from halfmoon_conductor.api.responses.responses_objects import ResponseObject
from halfmoon_conductor.api.responses.responses_requests import ResponsesRequest
from halfmoon_conductor.api.responses.responses_serializer import ResponsesSerializer
from halfmoon_conductor.http_server.request_context import RequestContextDependency
from halfmoon_conductor.inputs.preparation_messages import read_body_of
from halfmoon_conductor.routes.generation_handler import GenerationHandler
from halfmoon_conductor.routes.openapi_responses import OpenApiResponses


def messages_router(
    handler: GenerationHandler,
    generation_responses: OpenApiResponses,
    count_responses: OpenApiResponses,
    route_class: type[APIRoute],
) -> APIRouter:
    """Make the routes of Anthropic's Messages API.

    Args:
        handler: generates answers.
        generation_responses: of the generating route, for the schema.
        count_responses: of the route that counts tokens.
        route_class: reads their bodies.
    """
    router = APIRouter(route_class=route_class)

    @router.post("/v1/messages", response_model=AnthropicMessage, responses=generation_responses)
    async def create_message(
        body: MessagesRequest, request: Request, context: RequestContextDependency
    ) -> Response:
        """Answer a conversation, in Anthropic's shapes."""
        chat, read = body.as_chat(), read_body_of(request.scope)
        engine_request = await handler.inputs.chat(chat, context, read.prepared)
        output = handler.generate(engine_request, context, read.received_s)
        return await handler.respond(
            MessagesSerializer(output, body.model),
            context,
            stream=bool(body.stream),
            error_event=anthropic_error_event,
        )

    @router.post("/v1/messages/count_tokens", responses=count_responses)
    async def count_tokens(body: CountTokensRequest) -> TokenCount:
        """Count the tokens of a conversation."""
        encoder = handler.inputs.encoder
        encoder.model_card(body.model)
        n_tokens = len(encoder.encode_conversation(body.as_chat(), inline=True))
        return TokenCount(input_tokens=n_tokens)

    return router


def responses_router(
    handler: GenerationHandler, generation_responses: OpenApiResponses, route_class: type[APIRoute]
) -> APIRouter:
    """Make the route of OpenAI's Responses API.

    Args:
        handler: generates answers.
        generation_responses: of its route, for the schema.
        route_class: reads its bodies.
    """
    router = APIRouter(route_class=route_class)

    @router.post("/v1/responses", response_model=ResponseObject, responses=generation_responses)
    async def create_response(
        body: ResponsesRequest, request: Request, context: RequestContextDependency
    ) -> Response:
        """Answer an input. Nothing is stored: send the whole conversation each time."""
        chat, read = body.as_chat(), read_body_of(request.scope)
        engine_request = await handler.inputs.chat(chat, context, read.prepared)
        output = handler.generate(engine_request, context, read.received_s)
        serializer = ResponsesSerializer(output, body)
        return await handler.respond(
            serializer, context, stream=bool(body.stream), error_event=serializer.error_event
        )

    return router
