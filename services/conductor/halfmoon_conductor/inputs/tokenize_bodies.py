"""Answer ``/tokenize`` and ``/detokenize`` from a checked body."""

from halfmoon_conductor.api.tokenize_models import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from halfmoon_conductor.inputs.prompt_encoder import PromptEncoder


def tokenize_body(encoder: PromptEncoder, body: TokenizeRequest) -> TokenizeResponse:
    """Return the tokens of a text, or of a conversation as the chat template writes it.

    Raises:
        ApiError: as `PromptEncoder.encode_conversation` and `PromptEncoder.encode`.
    """
    card = encoder.model_card(body.model)
    if body.messages is not None:
        tokens = encoder.encode_conversation(body.as_chat(body.messages))
    else:
        tokens = encoder.encode(body.prompt or "", body.add_special_tokens is not False)
    texts = [encoder.token_text(each) for each in tokens] if body.return_token_strs else None
    return TokenizeResponse(
        count=len(tokens), max_model_len=card.max_tokens, tokens=tokens, token_strs=texts
    )


def detokenize_body(encoder: PromptEncoder, body: DetokenizeRequest) -> DetokenizeResponse:
    """Return the text of tokens; special tokens have none.

    Raises:
        ApiError: the model does not have one of them.
    """
    encoder.model_card(body.model)
    return DetokenizeResponse(prompt=encoder.decode(body.tokens))
