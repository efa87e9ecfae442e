"""Try what a checkpoint brings once, before the process that serves all streams opens it.

A chat template is a program, and so is a tokenizer, nearly: patterns and normalisers may take any
time and memory. A child process opens both and works on a text of each length class, within the
limits that bodies have. What passes them is refused by name.
"""

import asyncio

import msgspec

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.errors import ApiError, RequestTooCostly
from halfmoon_conductor.inputs.body_preparers import ProcessPreparer
from halfmoon_conductor.inputs.preparation_messages import PreparationJob
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_sandbox import ChildUnavailable, LoadFailed

#: Characters of the texts that are tried: a word, some pages, a book.
_LENGTHS = (2, 8 * 1024, 128 * 1024)
_PROSE = "It is half a moon, and 1,024 boats are out tonight. "
_CARD = ModelCard(name="trial", max_context=2**20, created=0)


async def try_checkpoint(preparer: ProcessPreparer, spec: str) -> None:
    """Tokenize and render sample texts of the model `spec` in a child of `preparer`.

    A tokenizer that can't be opened for other reasons is left for its opener to name them.

    Raises:
        TokenizerUnavailable: it takes too much time or memory, or crashes.
    """
    try:
        await asyncio.to_thread(preparer.wait_ready)
    except LoadFailed as error:
        if error.limit:
            raise TokenizerUnavailable(
                f"the tokenizer or the chat template of {spec} can't be opened: {error.detail}"
            ) from None
        return
    except ChildUnavailable as error:
        raise TokenizerUnavailable(f"{spec} can't be tried: {error}") from None
    for length in _LENGTHS:
        text = (_PROSE * (length // len(_PROSE) + 1))[:length]
        turns = [{"role": role, "content": text} for role in ("user", "assistant", "user")]
        await _try(preparer, spec, "tokenizer", "CompletionRequest", length, prompt=text)
        await _try(preparer, spec, "chat template", "ChatRequest", length, messages=turns)


async def _try(
    preparer: ProcessPreparer, spec: str, part: str, model_name: str, length: int, **fields: object
) -> None:
    content = msgspec.json.encode({"model": _CARD.name, "max_tokens": 1, **fields})
    try:
        await preparer.prepare(PreparationJob(model_name, content, _CARD))
    except RequestTooCostly:
        raise TokenizerUnavailable(
            f"the {part} of {spec} takes more time or memory for a text of {length} characters "
            "than one request may; serve a checkpoint with another"
        ) from None
    except ApiError:
        pass  # a template may refuse these turns
