"""Serve OpenAI's API: completions, chat completions and models."""

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from halfmoon_conductor.api.openai.chat_serializer import ChatSerializer
from halfmoon_conductor.api.openai.completion_serializer import CompletionSerializer
from halfmoon_conductor.api.openai.logprob_serializer import LogprobSerializer
from halfmoon_conductor.api.openai.openai_objects import (
    ChatCompletion,
    Model,
    ModelList,
    TextCompletion,
)
from halfmoon_conductor.api.openai.openai_requests import ChatRequest, CompletionRequest
from halfmoon_conductor.api.openai.shared_fields import SharedFields
from halfmoon_conductor.engine_io.gateway_interface import Gateway, ModelCard
from halfmoon_conductor.http_server.request_context import RequestContextDependency
from halfmoon_conductor.inputs.preparation_messages import read_body_of
from halfmoon_conductor.inputs.prompt_encoder import PromptEncoder
from halfmoon_conductor.inputs.sampling_defaults import SamplingDefaults
from halfmoon_conductor.routes.generation_handler import GenerationHandler
from halfmoon_conductor.routes.openapi_responses import GENERATION_RESPONSES, error_responses_of
from halfmoon_conductor.text.tokenizer_interface import Tokenizer


def completions_router(
    handler: GenerationHandler, tokenizer: Tokenizer, route_class: type[APIRoute]
) -> APIRouter:
    """Make the routes that generate.

    Args:
        handler: generates answers.
        tokenizer: writes tokens in log probabilities.
        route_class: reads their bodies.
    """
    router = APIRouter(route_class=route_class)

    def logprobs(body: SharedFields) -> LogprobSerializer:
        return LogprobSerializer(tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))

    @router.post("/v1/completions", response_model=TextCompletion, responses=GENERATION_RESPONSES)
    async def create_completion(
        body: CompletionRequest, request: Request, context: RequestContextDependency
    ) -> Response:
        """Complete a text."""
        read = read_body_of(request.scope)
        engine_request = await handler.inputs.completion(body, context, read.prepared)
        output = handler.generate(engine_request, context, read.received_s)
        serializer = CompletionSerializer(output, body, logprobs(body))
        return await handler.respond(serializer, context, stream=bool(body.stream))

    @router.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses=GENERATION_RESPONSES
    )
    async def create_chat_completion(
        body: ChatRequest, request: Request, context: RequestContextDependency
    ) -> Response:
        """Answer a conversation."""
        read = read_body_of(request.scope)
        engine_request = await handler.inputs.chat(body, context, read.conversation)
        output = handler.generate(engine_request, context, read.received_s)
        serializer = ChatSerializer(output, body, logprobs(body))
        return await handler.respond(serializer, context, stream=bool(body.stream))

    return router


def models_router(
    gateway: Gateway, encoder: PromptEncoder, defaults: SamplingDefaults
) -> APIRouter:
    """Make the routes that describe the model served.

    Args:
        gateway: knows the model.
        encoder: finds the model by its name.
        defaults: of sampling fields that requests leave out.
    """
    router = APIRouter()

    def describe(card: ModelCard) -> Model:
        return Model(
            id=card.name,
            object="model",
            created=card.created,
            owned_by="halfmoon",
            max_model_len=card.max_tokens,
            default_sampling_params=defaults.stated,
        )

    @router.get("/v1/models", responses=error_responses_of(401, 429))
    async def list_models() -> ModelList:
        """List the model served, once the cluster has been ready."""
        card = gateway.model
        return ModelList(object="list", data=[] if card is None else [describe(card)])

    @router.get("/v1/models/{model:path}", responses=error_responses_of(401, 404, 429, 503))
    async def retrieve_model(model: str) -> Model:
        """Return one model by its name, which may have slashes."""
        return describe(encoder.model_card(model))

    return router
