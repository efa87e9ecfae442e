"""Answer ``/tokenize`` and ``/detokenize`` from a checked body."""

from halfmoon_conductor.api.template_switches import begins_turn, continues_turn
from halfmoon_conductor.api.tokenize_models import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from halfmoon_conductor.inputs.prompt_encoder import PromptEncoder


def tokenize_body(
    encoder: PromptEncoder, body: TokenizeRequest, *, inline: bool = False
) -> TokenizeResponse:
    """Return the tokens of a text, or of a conversation as the chat template writes it.

    Raises:
        ApiError: as `PromptEncoder.encode_messages` and `PromptEncoder.encode`.
        InlineLimitExceeded: `inline`, and it is too much work for the event loop.
    """
    card = encoder.model_card(body.model)
    if body.messages is not None:
        tokens = encoder.encode_messages(
            body.messages,
            add_generation_prompt=begins_turn(body),
            continue_final_message=continues_turn(body),
            variables=body.chat_template_kwargs,
            inline=inline,
        )
    else:
        tokens = encoder.encode(body.prompt or "", body.add_special_tokens is not False)
    texts = [encoder.token_text(each) for each in tokens] if body.return_token_strs else None
    return TokenizeResponse(
        count=len(tokens), max_model_len=card.max_context, tokens=tokens, token_strs=texts
    )


def detokenize_body(encoder: PromptEncoder, body: DetokenizeRequest) -> DetokenizeResponse:
    """Return the text of tokens; special tokens have none.

    Raises:
        ApiError: the model does not have one of them.
    """
    encoder.model_card(body.model)
    return DetokenizeResponse(prompt=encoder.decode(body.tokens))
