"""`halfmoon chat`: one answer for a pipe, a conversation for a terminal."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from halfmoon_cli.__main__ import app
from halfmoon_cli.chat.interrupts import Interrupts
from halfmoon_cli.chat.line_input import SlashCommand, parse_line
from halfmoon_cli.chat.streamed_answer import StreamedAnswer, format_answer_stats
from halfmoon_cli.common.printable_text import printable
from halfmoon_cli.endpoint.stream_chunks import PromptDetails, StreamUsage
from halfmoon_testing.processes.cli_terminal import CliTerminal, run_on_terminal
from halfmoon_testing.scripted_endpoint import ScriptedAnswer, ScriptedEndpoint

BUSY = ScriptedAnswer(
    status=429,
    headers={"Retry-After": "0.01"},
    body={"error": {"message": "too busy", "code": "overloaded"}},
)


def chat(*arguments: str, said: str = "", **environment: str) -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=said, env=environment)


# One answer


def test_a_question_gets_its_answer_and_nothing_else(endpoint: ScriptedEndpoint) -> None:
    result = chat("What is it?", "--url", endpoint.url)
    assert (result.stdout, result.stderr, result.exit_code) == ("one two three\n", "", 0)
    (path, body), *_ = endpoint.asked
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "What is it?"}]
    assert body["model"] == "scripted"
    assert body["stream_options"] == {"include_usage": True}


def test_what_nobody_asked_for_is_not_sent(endpoint: ScriptedEndpoint) -> None:
    chat("hi", "--url", endpoint.url)
    assert endpoint.asked[0][1].keys() == {"model", "messages", "stream", "stream_options"}
    chat("hi", "--url", endpoint.url, "--priority", "-2", "--max-tokens", "9", "--system", "Short.")
    body = endpoint.asked[1][1]
    assert (body["priority"], body["max_tokens"]) == (-2, 9)
    assert body["messages"][0] == {"role": "system", "content": "Short."}


def test_standard_input_is_the_question_when_there_is_no_other(endpoint: ScriptedEndpoint) -> None:
    assert chat("--url", endpoint.url, said="From a pipe?\n").stdout == "one two three\n"
    assert endpoint.asked[0][1]["messages"][0]["content"] == "From a pipe?"


def test_files_and_input_go_before_the_question(endpoint: ScriptedEndpoint, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a fact\n")
    wanted = ("--file", str(tmp_path / "notes.txt"), "--file", "-")
    assert chat("Which?", "--url", endpoint.url, *wanted, said="another").exit_code == 0
    content = endpoint.asked[0][1]["messages"][0]["content"]
    assert content == "notes.txt:\na fact\n\ninput:\nanother\n\nWhich?"


def test_figures_are_told_apart_from_the_answer(endpoint: ScriptedEndpoint) -> None:
    result = chat("hi", "--url", endpoint.url, "--stats")
    assert result.stdout == "one two three\n"
    assert "3 tokens · 4 of 10 prompt tokens cached" in result.stderr


def test_url_and_key_come_from_the_environment(endpoint: ScriptedEndpoint) -> None:
    endpoint.key = "secret"
    named = {"OPENAI_BASE_URL": f"{endpoint.url}/v1", "OPENAI_API_KEY": "secret"}
    assert chat("hi", **named).stdout == "one two three\n"
    first = chat("hi", **{**named, "HALFMOON_URL": "http://127.0.0.1:9"})
    assert "http://127.0.0.1:9/v1" in first.stderr


def test_no_question_is_said_so(endpoint: ScriptedEndpoint) -> None:
    result = chat("--url", endpoint.url)
    assert result.exit_code == 2 and "no question" in result.stderr
    assert not endpoint.asked


def test_a_missing_key_is_named_with_its_flag(endpoint: ScriptedEndpoint) -> None:
    endpoint.key = "secret"
    result = chat("hi", "--url", endpoint.url)
    assert result.exit_code == 1
    assert "(401): give a key with --api-key or OPENAI_API_KEY" in result.stderr


def test_a_wrong_model_is_told_with_those_that_are_served(endpoint: ScriptedEndpoint) -> None:
    endpoint.models = ("a", "b")
    result = chat("hi", "--url", endpoint.url, "--model", "c")
    assert result.exit_code == 1
    assert "--model; served here: a, b" in result.stderr


def test_an_endpoint_that_lists_no_model_wants_one_named(endpoint: ScriptedEndpoint) -> None:
    endpoint.models = ()
    assert "name one with --model" in chat("hi", "--url", endpoint.url).stderr


def test_a_refusal_ends_it_unless_retries_were_wished_for(endpoint: ScriptedEndpoint) -> None:
    endpoint.scripts = [BUSY, BUSY, ScriptedAnswer()]
    result = chat("hi", "--url", endpoint.url)
    assert result.exit_code == 1 and "too busy (429)" in result.stderr
    assert chat("hi", "--url", endpoint.url, "--retry", "2").stdout == "one two three\n"
    assert len(endpoint.asked) == 3


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (ScriptedAnswer(cut_after=2), "cut off"),
        (ScriptedAnswer(error="worker died"), "given up: worker died"),
        (ScriptedAnswer(end_after=2), "without a reason"),
    ],
)
def test_an_answer_that_breaks_off_is_shown_and_is_a_failure(
    endpoint: ScriptedEndpoint, script: ScriptedAnswer, told: str
) -> None:
    endpoint.scripts = [script]
    result = chat("hi", "--url", endpoint.url)
    assert result.exit_code == 1 and told in result.stderr
    assert result.stdout.startswith("one two") and result.stdout.endswith("\n")


# What a conversation is


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("/file a b.txt", SlashCommand("file", "a b.txt")),
        ("/again", SlashCommand("again")),
        ("//usr/bin", "/usr/bin"),
        ("what about /this", "what about /this"),
    ],
)
def test_a_slash_at_the_start_commands(line: str, meant: object) -> None:
    assert parse_line(line) == meant


@given(st.text())
def test_no_word_of_a_model_commands_the_terminal(text: str) -> None:
    shown = printable(text)
    assert all(c.isprintable() or c in "\t\n" or ord(c) > 0x9F for c in shown)


def test_plain_text_and_line_ends_stay_as_they_are() -> None:
    assert printable("é 月\r\n\tx") == "é 月\n\tx"
    assert printable("\x1b[2J") == "␛[2J"


def test_a_rate_leaves_the_first_token_out_and_is_not_made_up() -> None:
    usage = StreamUsage(10, 5, PromptDetails(8))
    assert format_answer_stats(StreamedAnswer("x", "stop", usage, 5, 0.25, 1.25)) == (
        "TTFT 250 ms · 4.0 tokens/s · 5 tokens · 8 of 10 prompt tokens cached"
    )
    assert format_answer_stats(StreamedAnswer("x", "length", None, 1, 2.0, 2.0)) == (
        "TTFT 2.00 s · 1 token · cut at max_tokens"
    )
    assert format_answer_stats(
        StreamedAnswer("x", "stop", StreamUsage(10, 1), 1, 2.0, 2.0)
    ).endswith("10 prompt tokens")


# On a terminal


@contextmanager
def conversation(url: str, home: Path) -> Iterator[CliTerminal]:
    """A conversation that has come to its first prompt; Ctrl-D must end it."""
    with run_on_terminal(
        ["chat", "--url", url], {"XDG_STATE_HOME": str(home)}, end="\x04"
    ) as terminal:
        terminal.until("> ")
        yield terminal


def test_a_conversation_remembers_shows_figures_and_obeys(
    endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("a fact")
    with conversation(endpoint.url, tmp_path) as terminal:
        shown = terminal.ask("first?")
        assert "one two three" in shown
        assert "3 tokens · 4 of 10 prompt tokens cached" in shown
        terminal.ask("/system Be kind.")
        assert "6 characters" in terminal.ask(f"/file {tmp_path / 'notes.txt'}")
        terminal.ask("second?")
        assert "one two three" in terminal.ask("/again")
        assert "wrote" in terminal.ask(f"/save {tmp_path / 'saved.json'}")
        assert "there is no /nonsense" in terminal.ask("/nonsense")
        assert "No such file" in terminal.ask("/file nowhere")
        terminal.ask("/reset")
        assert "nothing was asked" in terminal.ask("/again")
    bodies = [body["messages"] for _, body in endpoint.asked]
    assert [m["content"] for m in bodies[1]] == [
        "Be kind.",
        "first?",
        "one two three",
        "notes.txt:\na fact\n\nsecond?",
    ]
    assert bodies[2] == bodies[1]
    assert json.loads((tmp_path / "saved.json").read_text())["messages"][:4] == bodies[1]
    assert len(json.loads((tmp_path / "saved.json").read_text())["messages"]) == 5


def test_ctrl_c_stops_the_answer_and_not_the_program(
    endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    endpoint.scripts = [ScriptedAnswer(hold_after=2), ScriptedAnswer()]
    with conversation(endpoint.url, tmp_path) as terminal:
        terminal.type("first?\n")
        terminal.until("one two")
        assert "stopped" in terminal.interrupt("> ")
        assert endpoint.client_gone.wait(60)
        terminal.type("never mind")
        terminal.until("never mind")
        assert "Ctrl-D ends" in terminal.interrupt("> ")
        assert "three" in terminal.ask("second?")
    # What was seen of the first answer is part of what was said.
    assert [m["content"] for m in endpoint.asked[1][1]["messages"]] == [
        "first?",
        "one two",
        "second?",
    ]


def test_ctrl_c_counts_once_where_somebody_waits_for_it_and_nowhere_else() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                # What is done about the first is not struck by the second.
                signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_refusal_is_shown_and_tried_again_when_the_user_says_so(
    endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    endpoint.scripts = [BUSY, BUSY, ScriptedAnswer()]
    with conversation(endpoint.url, tmp_path) as terminal:
        terminal.type("first?\n")
        assert "too busy (429)" in terminal.until("Ctrl-C: no")
        terminal.interrupt("> ")
        terminal.type("/again\n")
        terminal.until("Ctrl-C: no")
        terminal.type("\n")
        assert "one two three" in terminal.until("cached")
        terminal.until("> ")


def test_lines_come_back_in_the_next_conversation_for_their_owner_alone(
    endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    with conversation(endpoint.url, tmp_path) as terminal:
        terminal.ask("first?")
    with conversation(endpoint.url, tmp_path) as terminal:
        terminal.type("\x1b[A\x1b[A\n")
        terminal.until("cached")
        terminal.until("> ")
    assert endpoint.asked[1][1]["messages"][-1]["content"] == "first?"
    history = tmp_path / "halfmoon" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
