"""Turn a request's sampling fields into what the workers sample and stop by.

Fields that the client left out have the model's own defaults, else OpenAI's.
"""

from typing import Any

from halfmoon_conductor.api.openai.shared_fields import SharedFields
from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.inputs.sampling_defaults import SamplingDefaults
from halfmoon_protocol.sampling import Sampling, Stopping

#: Below this, dividing logits by the temperature overflows: such requests are greedy.
LEAST_TEMPERATURE = 1e-5


def logit_biases_of(body: SharedFields) -> tuple[tuple[int, float], ...]:
    """Return token ids with the bias to add to their logits."""
    return tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items())


def sampling_of(
    body: SharedFields,
    defaults: SamplingDefaults,
    *,
    seed: int,
    grammar: str,
    biases: tuple[tuple[int, float], ...],
) -> Sampling:
    """Return how tokens are drawn.

    Args:
        body: the client's request.
        defaults: of the fields that it leaves out.
        seed: of this choice.
        grammar: what the answer must match; empty: anything.
        biases: as `logit_biases_of` returns them.
    """

    def value(name: str, neutral: float) -> Any:
        given = getattr(body, name)
        default = getattr(defaults, name) if given is None else given
        return neutral if default is None else default

    temperature = value("temperature", 1.0)
    return Sampling(
        temperature=0.0 if temperature < LEAST_TEMPERATURE else temperature,
        top_p=value("top_p", 1.0),
        top_k=max(value("top_k", 0), 0),
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=seed,
        logit_bias=biases,
        logprobs=body.n_top,
        prompt_logprobs=body.n_prompt_top,
        grammar=grammar,
    )


def stopping_of(
    body: SharedFields, *, max_new_tokens: int, eos_token_ids: tuple[int, ...]
) -> Stopping:
    """Return what ends the answer.

    Args:
        body: the client's request.
        max_new_tokens: most new tokens where the client sets no limit.
        eos_token_ids: the model's end-of-text tokens.

    Raises:
        InvalidRequest: `min_tokens` is over the limit.
    """
    requested = body.n_generated_tokens
    limit = max_new_tokens if requested is None else requested
    if (body.min_tokens or 0) > limit:
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens}, over the {limit} new tokens that "
            "this request has without max_tokens; send max_tokens too.",
            param="min_tokens",
        )
    eos = () if body.ignore_eos else eos_token_ids
    return Stopping(
        max_new_tokens=limit,
        stop_token_ids=tuple(dict.fromkeys((*eos, *(body.stop_token_ids or ())))),
        min_new_tokens=body.min_tokens or 0,
    )
