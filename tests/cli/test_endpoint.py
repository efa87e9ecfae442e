"""What a client makes of an endpoint's address, its bytes and its refusals."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_cli.endpoint import sse_events
from halfmoon_cli.endpoint.endpoint_address import parse_endpoint
from halfmoon_cli.endpoint.endpoint_errors import (
    BadEndpointUrl,
    StreamBroken,
    connection_error,
    refusal_error,
)
from halfmoon_cli.endpoint.model_list import model_names
from halfmoon_cli.endpoint.sse_events import SseReader
from halfmoon_cli.endpoint.stream_chunks import read_chunk

LINES = st.binary(max_size=20).filter(lambda data: b"\n" not in data and b"\r" not in data)


@pytest.mark.parametrize(
    ("url", "api", "root"),
    [
        ("http://h:1", "http://h:1/v1", "http://h:1"),
        ("http://h:1/", "http://h:1/v1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1/v1", "http://h:1"),
        ("https://h/proxy/v1", "https://h/proxy/v1", "https://h/proxy"),
        ("https://h/v1beta/openai/", "https://h/v1beta/openai", "https://h/v1beta/openai"),
        ("http://[::1]:8000", "http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_a_url_without_a_path_gets_v1_and_any_other_is_taken_as_it_is(
    url: str, api: str, root: str
) -> None:
    endpoint = parse_endpoint(url)
    assert (endpoint.api, endpoint.root) == (api, root)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://h", "http://"])
def test_what_is_no_url_is_refused_with_how_to_write_one(url: str) -> None:
    with pytest.raises(BadEndpointUrl, match="http://HOST:PORT"):
        parse_endpoint(url)


def test_a_key_is_a_bearer_token_and_none_is_no_header() -> None:
    assert parse_endpoint("http://h", "k").headers == {"Authorization": "Bearer k"}
    assert parse_endpoint("http://h").headers == {}
    with pytest.raises(BadEndpointUrl, match="API key"):
        parse_endpoint("http://h", "ключ")


@given(st.lists(LINES, max_size=6), st.sampled_from([b"\n", b"\r\n"]), st.data())
def test_events_are_the_same_however_their_bytes_are_cut(
    said: list[bytes], end: bytes, data: st.DataObject
) -> None:
    stream = b"".join(
        b": ping" + end + b"event: e" + end + b"data: " + line + end + end for line in said
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = SseReader()
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [event for piece in pieces for event in reader.feed(piece)] == said


def test_data_lines_of_one_event_are_joined_and_a_space_is_optional() -> None:
    assert SseReader().feed(b"data:one\ndata: two\n\n\n\n") == [b"one\ntwo"]


def test_an_event_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_events, "MAX_EVENT_BYTES", 100)
    reader = SseReader()
    with pytest.raises(StreamBroken, match="more than"):
        for _ in range(20):
            reader.feed(b"data: 0123456789\n")


def test_chunks_of_chats_and_completions_read_alike() -> None:
    chat = read_chunk(b'{"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}')
    completion = read_chunk(b'{"choices":[{"text":"hi","finish_reason":null}],"usage":null}')
    for chunk in (chat, completion):
        assert (chunk.text, chunk.has_tokens, chunk.finish_reason) == ("hi", True, None)


def test_the_opening_of_a_chat_and_the_end_of_an_answer_bring_no_token() -> None:
    for data in (
        b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
        b'{"choices":[{"delta":{},"finish_reason":"stop"}]}',
        b'{"choices":[{"text":"","finish_reason":"stop"}]}',
        b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}',
    ):
        assert not read_chunk(data).has_tokens
    # A token that is half a character has no text yet.
    assert read_chunk(b'{"choices":[{"text":"","finish_reason":null}]}').has_tokens


def test_thoughts_are_no_text_and_come_under_either_name() -> None:
    for name in (b"reasoning", b"reasoning_content"):
        chunk = read_chunk(b'{"choices":[{"delta":{"' + name + b'":"hm"}}]}')
        assert (chunk.text, chunk.thoughts, chunk.has_tokens) == ("", "hm", True)


def test_cached_tokens_are_unknown_when_the_endpoint_does_not_say() -> None:
    silent = read_chunk(b'{"usage":{"prompt_tokens":3,"completion_tokens":2}}').usage
    open_ = read_chunk(b'{"usage":{"prompt_tokens_details":{"cached_tokens":0}}}').usage
    assert silent is not None and silent.n_cached is None
    assert open_ is not None and open_.n_cached == 0


def test_an_error_in_the_stream_and_what_is_no_chunk_break_it() -> None:
    with pytest.raises(StreamBroken, match="worker died"):
        read_chunk(b'{"error":{"message":"worker died"}}')
    with pytest.raises(StreamBroken, match="no chunk"):
        read_chunk(b"<html>")


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (401, b'{"error":{"message":"No key."}}', "No key (401): give a key with --api-key"),
        (404, b'{"error":{"message":"no x","code":"model_not_found"}}', "--model"),
        (404, b'{"detail":"Not Found"}', "--url or HALFMOON_URL names another"),
        (429, b'{"error":{"message":"busy","code":"overloaded"}}', "busy (429): try again later"),
        (400, b'{"error":{"message":"long","code":"context_length_exceeded"}}', "send less"),
        (500, b"<h1>oh</h1>", "<h1>oh</h1> (500)"),
        (502, b"", "the endpoint answered Bad Gateway (502)"),
        (400, b'{"error":"just words"}', "just words (400)"),
    ],
)
def test_a_refusal_has_the_endpoints_words_and_the_way_out(
    status: int, body: bytes, told: str
) -> None:
    assert told in str(refusal_error(status, {}, body))


@pytest.mark.parametrize(
    ("status", "header", "expected_s"),
    [
        (429, {"retry-after": "2.5"}, 2.5),
        (503, {"retry-after": "7"}, 7.0),
        (429, {}, 1.0),
        (429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
        (429, {"retry-after": "nan"}, 1.0),
        (429, {"retry-after": "-3"}, 0.0),
        (429, {"retry-after": "1e9"}, 3600.0),
        (400, {"retry-after": "7"}, None),
    ],
)
def test_only_what_may_pass_is_worth_another_try(
    status: int, header: dict[str, str], expected_s: float | None
) -> None:
    assert refusal_error(status, header, b"").retry_after_s == expected_s


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (httpx.ConnectError("refused"), "halfmoon up"),
        (httpx.ConnectTimeout(""), "check the address"),
        (httpx.ReadTimeout(""), "--timeout"),
        (httpx.RemoteProtocolError(""), "RemoteProtocolError"),
    ],
)
def test_who_can_not_be_reached_is_named_with_a_way_out(error: httpx.HTTPError, told: str) -> None:
    text = str(connection_error("http://h:1/v1", error))
    assert "http://h:1/v1" in text and told in text


def test_models_are_listed_in_order_and_nonsense_lists_none() -> None:
    assert model_names({"data": [{"id": "a"}, {"id": "b"}]}) == ["a", "b"]
    nonsense: list[object] = [{}, [], "x", {"data": None}, {"data": [1]}]
    assert [model_names(each) for each in nonsense] == [[]] * 5
