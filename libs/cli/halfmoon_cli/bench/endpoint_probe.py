"""Find an endpoint's model and its token ids, and have a first request answered."""

from typing import Any

import httpx
import msgspec

from halfmoon_cli.bench.bench_record import BenchRecord
from halfmoon_cli.bench.load_plan import PlannedRequest, PromptPart
from halfmoon_cli.bench.prompt_writer import PromptWriter, RequestFormat, request_body
from halfmoon_cli.bench.request_sender import RequestSender
from halfmoon_cli.endpoint.endpoint_address import ApiEndpoint
from halfmoon_cli.endpoint.endpoint_client import open_client
from halfmoon_cli.endpoint.endpoint_errors import EndpointError
from halfmoon_cli.endpoint.model_list import first_model

#: Text to tokenise: prompts are drawn from its token ids, none of which is special.
_SAMPLE_TEXT = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work government"
    " number night point home water room mother area money story fact month lot right study book"
    " eye job word business issue side kind head house service friend father power hour game line"
    " end member law car city community name president team minute idea kid body information back"
    " parent face level office door health person art war history party result change morning"
    " reason research girl guy moment air teacher force education"
)
#: Seconds that the endpoint may take to answer a probe.
_PROBE_S = 60.0
#: Largest prompt and answer of the first request.
_FIRST_INPUT, _FIRST_OUTPUT = 64, 2


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint, its model, and the token ids that prompts are drawn from."""

    endpoint: ApiEndpoint
    model: str
    vocabulary: tuple[int, ...]


def probe_target(endpoint: ApiEndpoint, model: str, n_vocab: int | None) -> BenchTarget:
    """Ask the endpoint for its first model and for token ids, unless both are given.

    Raises:
        EndpointError: it does not answer as an OpenAI endpoint, or token ids remain unknown.
    """
    with open_client(endpoint, _PROBE_S) as client:
        name = model or first_model(client, endpoint)
        ids = range(n_vocab) if n_vocab is not None else _sample_ids(client, endpoint, name)
    return BenchTarget(endpoint=endpoint, model=name, vocabulary=tuple(ids))


def _sample_ids(client: httpx.Client, endpoint: ApiEndpoint, model: str) -> list[int]:
    body: dict[str, Any] = {"model": model, "prompt": _SAMPLE_TEXT, "add_special_tokens": False}
    try:
        answer = client.post(f"{endpoint.root}/tokenize", json=body)
        tokens = answer.json()["tokens"] if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        tokens = None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        tokens = []
    if not tokens:
        raise EndpointError(
            f"{endpoint.root}/tokenize does not say what token ids there are: give their number"
            " with --vocab"
        )
    return sorted(set(tokens))


async def send_first_request(
    sender: RequestSender, form: RequestFormat, writer: PromptWriter, like: PlannedRequest
) -> None:
    """Send a short request that is not counted, to see whether any can be answered.

    Raises:
        EndpointError: it was refused for good, or failed; with the endpoint's words.
    """
    parts = (PromptPart("first request", min(like.n_input, _FIRST_INPUT)),)
    n_output = min(like.n_output, _FIRST_OUTPUT)
    planned = PlannedRequest(index=0, at_s=0.0, parts=parts, n_output=n_output)
    record = BenchRecord(0, 0.0, planned.n_input, n_output)
    await sender.send(request_body(form, writer, planned), record)
    if record.outcome == "finished" or record.status in (429, 503):
        return
    hint = ""
    if record.status in (400, 422) and form.ignore_eos:
        hint = ". If the endpoint does not know the field ignore_eos, try --no-ignore-eos"
    raise EndpointError(f"the first request had no answer ({record.reason}){hint}")
