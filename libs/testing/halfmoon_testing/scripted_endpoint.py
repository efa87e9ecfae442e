"""Serve an OpenAI endpoint that answers by a script, with scripted faults, for tests.

It is a real HTTP server on loopback with a thread for each connection. It holds no model, counts
each piece of text as a token, and keeps its requests.
"""

import json
import socket
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec


class ScriptedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One scripted answer."""

    status: int = 200
    headers: Mapping[str, str] = {}
    #: Body of an answer whose status is not 200.
    body: Mapping[str, Any] | str = ""
    #: Pieces of text, one event each.
    pieces: tuple[str, ...] = ("one", " two", " three")
    finish_reason: str = "stop"
    n_prompt: int = 10
    n_cached: int | None = 4
    #: Number of pieces after which the connection is closed.
    cut_after: int | None = None
    #: Number of pieces after which the stream ends without a finish reason.
    end_after: int | None = None
    #: Number of pieces after which nothing comes until the client is gone.
    hold_after: int | None = None
    #: Text of an error event in place of the last piece; empty: none.
    error: str = ""


class ScriptedEndpoint:
    """Serve scripted answers; a context manager.

    Args:
        models: models that /v1/models lists.
        key: API key that every request needs; empty: none.
        vocab: number of token ids that /detokenize knows; 0: there is no such route.
    """

    def __init__(
        self, models: tuple[str, ...] = ("scripted",), *, key: str = "", vocab: int = 0
    ) -> None:
        self.models = models
        self.key = key
        self.vocab = vocab
        #: Next answers, in order; the last one is repeated.
        self.scripts: list[ScriptedAnswer] = [ScriptedAnswer()]
        #: Path and body of every POST.
        self.asked: list[tuple[str, dict[str, Any]]] = []
        #: Answers to a GET, by path.
        self.pages: dict[str, Any] = {}
        #: Answer of /tokenize; None: there is no such route.
        self.token_ids: list[int] | None = None
        #: Set while an answer is held back.
        self.holds = threading.Event()
        #: Set when a client left in the middle of an answer.
        self.client_gone = threading.Event()
        self._lock = threading.Lock()
        endpoint = self

        class Handler(_Handler):
            scripted = endpoint

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    def __enter__(self) -> "ScriptedEndpoint":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def next_script(self, path: str, body: dict[str, Any]) -> ScriptedAnswer:
        """Record a request and return its answer."""
        with self._lock:
            self.asked.append((path, body))
            return self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    #: Many clients may connect at one moment.
    request_queue_size = 512

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that leave, as tests do on purpose; report all other errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    scripted: ScriptedEndpoint
    protocol_version = "HTTP/1.1"
    # Send every event at once, in a packet of its own.
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        if not self._allowed():
            return
        models = [{"id": name, "object": "model"} for name in self.scripted.models]
        if self.path == "/v1/models":
            self._json(200, {"object": "list", "data": models})
        elif self.path in self.scripted.pages:
            self._json(200, self.scripted.pages[self.path])
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        if self.path == "/detokenize" and self.scripted.vocab:
            known = all(token < self.scripted.vocab for token in body["tokens"])
            self._json(200 if known else 400, {"prompt": "x"})
        elif self.path == "/tokenize" and self.scripted.token_ids is not None:
            self._json(200, {"tokens": self.scripted.token_ids})
        elif self.path not in ("/v1/chat/completions", "/v1/completions"):
            self._json(404, {"detail": "Not Found"})
        elif (script := self.scripted.next_script(self.path, body)).status != 200:
            self._json(script.status, script.body, script.headers)
        elif body["model"] not in self.scripted.models:
            error = {"message": f"The model `{body['model']}` does not exist.", "code": None}
            self._json(404, {"error": {**error, "code": "model_not_found"}})
        else:
            try:
                self._stream(script, chat=self.path == "/v1/chat/completions")
            except OSError:
                self.scripted.client_gone.set()

    def _allowed(self) -> bool:
        key = self.scripted.key
        if not key or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        error = {"message": "Incorrect API key provided", "code": "invalid_api_key"}
        self._json(401, {"error": error})
        return False

    def _json(
        self, status: int, data: Mapping[str, Any] | str, headers: Mapping[str, str] | None = None
    ) -> None:
        body = data.encode() if isinstance(data, str) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, script: ScriptedAnswer, *, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for n_said, piece in enumerate(script.pieces):
            if n_said == script.hold_after:
                self._until_gone()
                return
            if n_said == script.cut_after:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if n_said == script.end_after:
                self._chunk(b"")
                return
            self._event(_choice({"content": piece} if chat else piece, None))
        if script.error:
            self._event({"error": {"message": script.error, "code": "generation_failed"}})
        else:
            self._event(_choice({} if chat else "", script.finish_reason))
            self._event({"choices": [], "usage": _usage(script)})
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _until_gone(self) -> None:
        self.scripted.holds.set()
        self.connection.settimeout(60)
        if not self.connection.recv(1):
            self.scripted.client_gone.set()
        self.close_connection = True

    def _event(self, data: Mapping[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


def _choice(said: dict[str, str] | str, finish_reason: str | None) -> dict[str, Any]:
    said_in = {"text": said} if isinstance(said, str) else {"delta": said}
    return {"choices": [{"index": 0, **said_in, "finish_reason": finish_reason}], "usage": None}


def _usage(script: ScriptedAnswer) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": script.n_prompt,
        "completion_tokens": len(script.pieces),
        "total_tokens": script.n_prompt + len(script.pieces),
    }
    if script.n_cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": script.n_cached}
    return usage
