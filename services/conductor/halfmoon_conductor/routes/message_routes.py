"""Serve two more APIs for chats: Anthropic's Messages and OpenAI's Responses."""

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from halfmoon_conductor.api.anthropic.anthropic_objects import AnthropicMessage, TokenCount
from halfmoon_conductor.api.anthropic.anthropic_requests import CountTokensRequest, MessagesRequest
from halfmoon_conductor.api.anthropic.anthropic_serializer import (
    MessagesSerializer,
    anthropic_error_event,
)
from halfmoon_conductor.api.responses.responses_objects import DeletedResponse, ResponseObject
from halfmoon_conductor.api.responses.responses_requests import ResponsesRequest
from halfmoon_conductor.api.responses.responses_serializer import ResponsesSerializer
from halfmoon_conductor.http_server.auth_middleware import principal_of
from halfmoon_conductor.http_server.request_context import RequestContextDependency
from halfmoon_conductor.inputs.preparation_messages import read_body_of, take_read_body
from halfmoon_conductor.routes.generation_handler import GenerationHandler
from halfmoon_conductor.routes.generation_route import AnsweredByPreparer
from halfmoon_conductor.routes.openapi_responses import OpenApiResponses
from halfmoon_conductor.routes.response_conversations import ResponseConversations


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
        engine_request = await handler.inputs.chat(chat, context, read.conversation)
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
        raise AnsweredByPreparer

    return router


def responses_router(
    handler: GenerationHandler,
    conversations: ResponseConversations,
    generation_responses: OpenApiResponses,
    stored_responses: OpenApiResponses,
    route_class: type[APIRoute],
) -> APIRouter:
    """Make the routes of OpenAI's Responses API.

    Args:
        handler: generates answers.
        conversations: stores responses.
        generation_responses: of the generating route, for the schema.
        stored_responses: of the routes for stored responses.
        route_class: reads bodies.
    """
    router, stored = APIRouter(route_class=route_class), APIRouter()

    @router.post("/v1/responses", response_model=ResponseObject, responses=generation_responses)
    async def create_response(
        body: ResponsesRequest, request: Request, context: RequestContextDependency
    ) -> Response:
        """Answer an input, or go on from a stored response."""
        chat, read = body.as_chat(), take_read_body(request.scope)
        engine_request = await handler.inputs.chat(chat, context, read.conversation)
        output = handler.generate(engine_request, context, read.received_s)
        content = conversations.content_to_store(body, read.expanded, engine_request.n_prompt)
        del read
        save = partial(conversations.save, context.principal.name, content)
        serializer = ResponsesSerializer(output, body, save, stores=conversations.stores)
        return await handler.respond(
            serializer, context, stream=bool(body.stream), error_event=serializer.error_event
        )

    @stored.get(
        "/v1/responses/{response_id}", response_model=ResponseObject, responses=stored_responses
    )
    async def retrieve_response(response_id: str, request: Request) -> Response:
        """Return a stored response."""
        content = await conversations.get(principal_of(request.scope).name, response_id)
        return Response(content, media_type="application/json")

    @stored.delete("/v1/responses/{response_id}", responses=stored_responses)
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        """Remove a stored response."""
        await conversations.delete(principal_of(request.scope).name, response_id)
        return DeletedResponse(id=response_id, object="response", deleted=True)

    router.include_router(stored)
    return router
