"""Answer ``/tokenize`` and ``/detokenize`` from a checked body."""

from halfmoon_conductor.api.tokenize_models import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from halfmoon_conductor.inputs.input_processor import InputProcessor


def tokenize_body(
    intake: InputProcessor, body: TokenizeRequest, *, here: bool = False
) -> TokenizeResponse:
    """The tokens of a text, or of a conversation as the chat template writes it.

    Raises:
        ApiError: as `InputProcessor.encode_messages` and `InputProcessor.encode`.
        NotShort: `here`, and it is much work.
    """
    card = intake.card(body.model)
    if body.messages is not None:
        tokens = intake.encode_messages(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs,
            here=here,
        )
    else:
        tokens = intake.encode(body.prompt or "", body.add_special_tokens is not False)
    strings = [intake.token_text(each) for each in tokens] if body.return_token_strs else None
    return TokenizeResponse(
        count=len(tokens), max_model_len=card.max_context, tokens=tokens, token_strs=strings
    )


def detokenize_body(intake: InputProcessor, body: DetokenizeRequest) -> DetokenizeResponse:
    """The text of tokens; special ones have none.

    Raises:
        ApiError: one of them is none of the model's.
    """
    intake.card(body.model)
    return DetokenizeResponse(prompt=intake.decode(body.tokens))
