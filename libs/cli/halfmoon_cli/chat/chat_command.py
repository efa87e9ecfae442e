"""Define `halfmoon chat`: its flags, and the answer to a single question.

On a terminal it holds a conversation (`chat_session`). With a question as its argument, or an
input that is no terminal, it prints one answer and nothing else.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from halfmoon_cli.chat.conversation import Conversation, RequestOptions, format_question, read_text
from halfmoon_cli.chat.line_input import LineReader, history_path
from halfmoon_cli.common.printable_text import printable
from halfmoon_cli.endpoint.endpoint_address import (
    DEFAULT_URL,
    ApiEndpoint,
    parse_endpoint,
)
from halfmoon_cli.endpoint.endpoint_errors import EndpointError, EndpointRefused
from halfmoon_cli.endpoint.endpoint_options import Key, Model, TlsCa, Url
from halfmoon_cli.endpoint.stream_chunks import StreamChunk

if TYPE_CHECKING:
    import httpx

    from halfmoon_cli.chat.streamed_answer import StreamedAnswer


def chat(
    question: Annotated[
        str, typer.Argument(help="Print one answer to this; without it: a conversation")
    ] = "",
    url: Url = DEFAULT_URL,
    model: Model = "",
    api_key: Key = "",
    tls_ca: TlsCa = "",
    system: Annotated[str, typer.Option(help="System prompt")] = "",
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Send this file's text before the question; may be repeated; -: input"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0: always the likeliest token")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer, at the most")] = None,
    seed: Annotated[int | None, typer.Option(help="Of what is drawn")] = None,
    priority: Annotated[int | None, typer.Option(help="Lower goes first (Halfmoon, vLLM)")] = None,
    retry: Annotated[
        int, typer.Option(min=0, help="Tries after a 429 or 503, each as late as it says")
    ] = 0,
    stats: Annotated[
        bool, typer.Option("--stats", help="For one answer: what it took, to standard error")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds without a byte")] = 600.0,
) -> None:
    """Talk to a model: Halfmoon's, or any endpoint that speaks OpenAI's API.

    With a QUESTION, or with input that is no terminal, it prints the answer and nothing else.
    """
    from halfmoon_cli.chat.chat_session import ChatSession
    from halfmoon_cli.chat.streamed_answer import format_answer_stats
    from halfmoon_cli.endpoint.endpoint_client import open_client
    from halfmoon_cli.endpoint.model_list import first_model

    options = RequestOptions(
        temperature=temperature, max_tokens=max_tokens, seed=seed, priority=priority
    )
    errors = Console(stderr=True)
    try:
        endpoint = parse_endpoint(url, api_key, tls_ca)
        files = [_read(path) for path in file or ()]
        talks = not question and sys.stdin.isatty() and sys.stdout.isatty()
        if not talks and not question and Path("-") not in (file or ()):
            question = sys.stdin.read().strip()
        with open_client(endpoint, timeout) as client:
            name = model or first_model(client, endpoint)
            conversation = Conversation(name, system, options, files=files)
            if talks:
                console = Console(highlight=False)
                session = ChatSession(client, endpoint, conversation, console, n_retries=retry)
                with LineReader(history_path(), "> ") as lines:
                    session.run(lines)
                return
            if not format_question(files, question):
                _give_up(errors, "no question: give one as an argument, or on standard input", 2)
            asked = conversation.ask(question)
            answer = _one_answer(client, endpoint, conversation, asked, retry)
            if stats:
                errors.print(Text(format_answer_stats(answer), "dim"), soft_wrap=True)
    except EndpointError as error:
        _give_up(errors, str(error), 1)
    except (OSError, ValueError) as error:
        _give_up(errors, str(error), 2)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _one_answer(
    client: "httpx.Client",
    endpoint: ApiEndpoint,
    conversation: Conversation,
    question: str,
    n_retries: int,
) -> "StreamedAnswer":
    """Print one answer as it arrives, with further tries after refusals."""
    from halfmoon_cli.chat.streamed_answer import StreamedAnswer, stream_answer

    shows = sys.stdout.isatty()

    def show(chunk: StreamChunk) -> None:
        if chunk.text:
            sys.stdout.write(printable(chunk.text) if shows else chunk.text)
            sys.stdout.flush()

    while True:
        answer = StreamedAnswer()
        try:
            stream_answer(client, endpoint, conversation.request(question), answer, show)
        except EndpointRefused as error:
            if error.status == 404 and (names := _names(client, endpoint)):
                raise EndpointError(f"{error}; served here: {', '.join(names)}") from None
            if error.retry_after_s is None or n_retries < 1:
                raise
            n_retries -= 1
            time.sleep(error.retry_after_s)
        else:
            return answer
        finally:
            if answer.text and not answer.text.endswith("\n"):
                sys.stdout.write("\n")
                sys.stdout.flush()


def _names(client: "httpx.Client", endpoint: ApiEndpoint) -> list[str]:
    from halfmoon_cli.endpoint.model_list import list_models

    try:
        return list_models(client, endpoint)
    except EndpointError:
        return []


def _read(path: Path) -> tuple[str, str]:
    return ("input", sys.stdin.read()) if path == Path("-") else read_text(path)


def _give_up(console: Console, message: str, status: int) -> NoReturn:
    console.print(Text.assemble(("halfmoon: ", "red"), printable(message)), soft_wrap=True)
    raise typer.Exit(status)
