"""Send one load to a system, and summarise it."""

import asyncio
import gc
from collections.abc import Sequence

import msgspec

from halfmoon_cli.bench.bench_record import BenchRecord, Slo
from halfmoon_cli.bench.load_generator import LoadGenerator, RunProgress
from halfmoon_cli.bench.load_plan import PlannedRequest, PromptPart, RequestChain
from halfmoon_cli.bench.prompt_writer import PromptWriter, RequestFormat, request_body
from halfmoon_cli.bench.request_sender import RequestSender
from halfmoon_cli.bench.run_summary import BenchSummary, summarize_run
from halfmoon_cli.endpoint.endpoint_address import parse_endpoint

#: Token ids of the models' tokenizer that are single printable bytes: texts of them have as many
#: tokens as characters.
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_IDS = range(300, 4000)


class TextWriter(PromptWriter):
    """Writes prompts as texts, one letter a token, for routers that compare texts."""

    def __init__(self, salt: str) -> None:
        super().__init__([ord(letter) for letter in _LETTERS], salt)

    def prompt(self, parts: Sequence[PromptPart]) -> msgspec.Raw:
        """Return the JSON text of a prompt."""
        ids = msgspec.json.decode(super().prompt(parts))
        return msgspec.Raw(msgspec.json.encode("".join(map(chr, ids))))


def send_load(
    url: str,
    chains: Sequence[RequestChain],
    slo: Slo,
    *,
    salt: str,
    as_text: bool,
    limit_s: float,
) -> BenchSummary:
    """Send requests when they are due and wait for their ends.

    Args:
        url: of the server.
        chains: the load.
        slo: limits of a good request.
        salt: a new one finds nothing cached of earlier loads.
        as_text: prompts are texts, else token ids.
        limit_s: a request that takes longer has failed.
    """
    return asyncio.run(_send_load(url, chains, slo, salt, as_text, limit_s))


async def _send_load(
    url: str,
    chains: Sequence[RequestChain],
    slo: Slo,
    salt: str,
    as_text: bool,
    limit_s: float,
) -> BenchSummary:
    form = RequestFormat(model="bench")
    writer = TextWriter(salt) if as_text else PromptWriter(_IDS, salt)
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    def clock() -> float:
        return loop.time() - began_s

    async with RequestSender(parse_endpoint(url), clock, limit_s=limit_s) as sender:
        progress = RunProgress(sum(map(len, chains)))

        async def send(planned: PlannedRequest, record: BenchRecord) -> None:
            await sender.send(request_body(form, writer, planned), record)

        gc.collect()
        gc.freeze()
        began_s = loop.time()
        try:
            await LoadGenerator(chains, send, clock, progress).run()
        finally:
            gc.unfreeze()
    return summarize_run(progress, slo)
