"""Hold a conversation on a terminal: read lines, and write answers as they come."""

import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

from halfmoon_cli.chat.conversation import Conversation, read_text
from halfmoon_cli.chat.interrupts import Interrupts
from halfmoon_cli.chat.line_input import LineReader, SlashCommand, help_text, parse_line
from halfmoon_cli.chat.streamed_answer import (
    StreamedAnswer,
    format_answer_stats,
    stream_answer,
)
from halfmoon_cli.common.printable_text import printable
from halfmoon_cli.endpoint.endpoint_address import ApiEndpoint
from halfmoon_cli.endpoint.endpoint_errors import EndpointError, EndpointRefused
from halfmoon_cli.endpoint.model_list import list_models
from halfmoon_cli.endpoint.stream_chunks import StreamChunk
from halfmoon_metadata.whole_file import replace_file


class ChatSession:
    """A conversation of one user at one terminal.

    Args:
        client: has the endpoint's headers and limits of time.
        endpoint: receives the requests.
        conversation: the conversation to continue.
        console: shows the answers.
        n_retries: further tries of refused requests that the user need not confirm.
    """

    def __init__(
        self,
        client: httpx.Client,
        endpoint: ApiEndpoint,
        conversation: Conversation,
        console: Console,
        *,
        n_retries: int = 0,
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._conversation = conversation
        self._console = console
        self._n_retries = n_retries
        self._interrupts = Interrupts()

    def run(self, lines: LineReader) -> None:
        """Read lines and act on them until Ctrl-D or /quit."""
        with self._interrupts:
            self._converse(lines)

    def _converse(self, lines: LineReader) -> None:
        self._say(
            f"{self._conversation.model} at {self._endpoint.api} · /help lists commands,"
            " Ctrl-D ends"
        )
        while True:
            try:
                with self._interrupts.allowed():
                    line = lines.read()
            except KeyboardInterrupt:
                self._console.print()
                self._say("Ctrl-D ends")
                continue
            except EOFError:
                self._console.print()
                return
            parsed = parse_line(line)
            if isinstance(parsed, SlashCommand):
                if parsed.name in ("quit", "exit"):
                    return
                self._run_command(parsed)
            elif parsed.strip() or self._conversation.files:
                self._answer(self._conversation.ask(parsed))

    def _run_command(self, command: SlashCommand) -> None:
        conversation = self._conversation
        match command:
            case SlashCommand("help"):
                self._say(help_text())
            case SlashCommand("again"):
                if question := conversation.ask_again():
                    self._answer(question)
                else:
                    self._say("nothing was asked yet")
            case SlashCommand("file", ""):
                self._say("/file PATH: which file?")
            case SlashCommand("file", path):
                self._add_file(Path(path).expanduser())
            case SlashCommand("system", ""):
                self._say(conversation.system or "no system prompt")
            case SlashCommand("system", text):
                conversation.system = "" if text == "-" else text
                self._say("it counts from the next message on")
            case SlashCommand("reset"):
                conversation.reset()
                self._say("forgotten")
            case SlashCommand("save", ""):
                self._say("/save PATH: where to?")
            case SlashCommand("save", path):
                self._save(Path(path).expanduser())
            case _:
                self._say(f"there is no /{command.name}; /help lists what is there")

    def _add_file(self, path: Path) -> None:
        try:
            name, text = read_text(path)
        except (OSError, ValueError) as error:
            self._complain(str(error))
            return
        self._conversation.files.append((name, text))
        self._say(f"{name}, {len(text):,} characters, goes with the next message")

    def _save(self, path: Path) -> None:
        try:
            replace_file(path, self._conversation.saved())
        except OSError as error:
            self._complain(str(error))
        else:
            self._say(f"wrote {path}")

    def _answer(self, question: str) -> None:
        """Send a question, again after refusals, until it is answered or the user stops."""
        n_left = self._n_retries
        while True:
            answer = StreamedAnswer()
            try:
                with self._interrupts.allowed():
                    self._stream(question, answer)
            except KeyboardInterrupt:
                self._finish(answer, "stopped")
                return
            except EndpointRefused as error:
                self._complain(str(error))
                if error.status == 404:
                    self._list_models()
                if error.retry_after_s is None:
                    return
                if not self._wait(error.retry_after_s, ask=n_left < 1):
                    return
                n_left -= 1
            except EndpointError as error:
                if answer.text:
                    self._finish(answer, "cut off")
                self._complain(str(error))
                return
            else:
                self._finish(answer)
                return

    def _stream(self, question: str, answer: StreamedAnswer) -> None:
        body = self._conversation.request(question)
        with self._console.status("[dim]reading …") as waiting:

            def show(chunk: StreamChunk) -> None:
                if chunk.has_tokens:
                    waiting.stop()
                if chunk.thoughts:
                    self._write(chunk.thoughts, "dim")
                if chunk.text:
                    self._write(chunk.text)

            stream_answer(self._client, self._endpoint, body, answer, show)

    def _finish(self, answer: StreamedAnswer, how: str = "") -> None:
        """End the line, show the figures, and keep the text so far as the answer."""
        if answer.n_pieces:
            self._console.print()
        if answer.text or not how:
            self._conversation.answered(answer.text)
        self._say(" · ".join(part for part in (how, format_answer_stats(answer)) if part))

    def _wait(self, seconds: float, *, ask: bool) -> bool:
        """Wait until the next try is due; return False when the user declines it."""
        try:
            with self._interrupts.allowed():
                if ask:
                    input(f"Try again in {seconds:g} s? Enter: yes, Ctrl-C: no ")
                else:
                    self._say(f"trying again in {seconds:g} s")
                time.sleep(seconds)
        except (KeyboardInterrupt, EOFError):
            self._console.print()
            return False
        return True

    def _list_models(self) -> None:
        try:
            names = list_models(self._client, self._endpoint)
        except EndpointError:
            return
        self._say(f"served here: {', '.join(names) or 'nothing'}")

    def _write(self, text: str, style: str = "") -> None:
        self._console.print(Text(printable(text), style), end="", soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(Text(printable(text), "dim"), soft_wrap=True)

    def _complain(self, text: str) -> None:
        self._console.print(Text(printable(text), "red"), soft_wrap=True)
