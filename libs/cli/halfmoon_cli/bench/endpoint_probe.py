"""Before the load: what the endpoint serves, what prompts can be written in, and a first answer."""

from collections.abc import Callable
from typing import Any

import msgspec

from halfmoon_cli.bench.bench_settings import BenchSettings
from halfmoon_cli.bench.load.bench_record import BenchRecord
from halfmoon_cli.bench.load.http_client import BenchHttpClient
from halfmoon_cli.bench.load.load_plan import PlannedRequest, PromptPart
from halfmoon_cli.bench.load.prompt_writer import (
    SAMPLE_TEXT,
    WORDS,
    PromptVocabulary,
    PromptWriter,
    RequestFormat,
    request_body,
)
from halfmoon_cli.bench.load.request_sender import RequestSender
from halfmoon_cli.endpoint.endpoint_address import ApiEndpoint, model_names
from halfmoon_cli.endpoint.endpoint_errors import EndpointError, EndpointUnreachable, refusal_error

#: Tokens of a warm-up request at the most, and of its answer.
_WARM_INPUT, _WARM_OUTPUT = 64, 2


async def find_model(wire: BenchHttpClient, endpoint: ApiEndpoint) -> str:
    """The first model that the endpoint lists.

    Raises:
        EndpointError: it does not answer as an OpenAI endpoint, or lists none.
    """
    try:
        answer = await wire.get(f"{endpoint.api}/models")
    except EndpointUnreachable as error:
        raise EndpointUnreachable(
            f"nothing answers at {endpoint.api} ({error}): `halfmoon up` starts a cluster,"
            " --url names another endpoint"
        ) from error
    if answer.status != 200:
        raise refusal_error(answer.status, answer.headers, answer.body)
    names = model_names(_json(answer.body))
    if not names:
        raise EndpointError(f"{endpoint.api}/models lists no model: name one with --model")
    return names[0]


async def find_vocabulary(
    wire: BenchHttpClient, endpoint: ApiEndpoint, model: str, settings: BenchSettings
) -> PromptVocabulary:
    """What to write prompts in: token ids where they are taken and known, else words.

    Ids are those that the endpoint's tokenizer makes of ordinary words, so none of them is
    special; with `vocab`, any below it.

    Raises:
        EndpointError: ids were asked for, and there is no way to know any.
    """
    wants_ids = settings.api == "completions" and settings.prompt != "text"
    if wants_ids and settings.vocab is not None:
        return PromptVocabulary(tokens=tuple(range(settings.vocab)))
    tokens = await _tokenized(wire, endpoint, model)
    if wants_ids and tokens:
        return PromptVocabulary(tokens=tuple(sorted(set(tokens))))
    if settings.prompt == "token-ids":
        raise EndpointError(
            f"{endpoint.root}/tokenize does not say what token ids there are: give their number"
            " with --vocab, or take --prompt text"
        )
    return PromptVocabulary(tokens_per_word=len(tokens) / len(WORDS) if tokens else 1.0)


async def _tokenized(wire: BenchHttpClient, endpoint: ApiEndpoint, model: str) -> list[int]:
    """The sample's tokens; none when the endpoint has no such route."""
    body: dict[str, Any] = {"model": model, "prompt": SAMPLE_TEXT, "add_special_tokens": False}
    try:
        answer = await wire.post(f"{endpoint.root}/tokenize", msgspec.json.encode(body))
    except EndpointError:
        return []
    found = _json(answer.body) if answer.status == 200 else None
    tokens = found.get("tokens") if isinstance(found, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        return []
    return tokens


async def warm_up(
    asker: RequestSender,
    form: RequestFormat,
    writer: PromptWriter,
    like: PlannedRequest,
    n_requests: int,
    clock: Callable[[], float],
) -> None:
    """Send short requests that are not counted; the first one shows whether any can be answered.

    Raises:
        EndpointError: it can't, and why.
    """
    for number in range(n_requests):
        parts = (PromptPart(f"warm up {number}", min(like.n_input, _WARM_INPUT)),)
        n_output = min(like.n_output, _WARM_OUTPUT)
        planned = PlannedRequest(index=number, at_s=0.0, parts=parts, n_output=n_output)
        record = BenchRecord(number, clock(), planned.n_input, n_output)
        await asker.ask(request_body(form, writer, planned), record)
        if record.outcome == "finished" or record.status in (429, 503):
            continue
        raise EndpointError(
            f"the first request had no answer ({record.reason}).{_hint(record, form)}"
        )


def _hint(record: BenchRecord, form: RequestFormat) -> str:
    if record.status not in (400, 404, 422):
        return ""
    ways = ["--api chat" if form.api == "completions" else "--api completions", "--prompt text"]
    if form.ignore_eos:
        ways.append("--no-ignore-eos")
    return f" If the endpoint does not know what is asked, try {', '.join(ways)}"


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
