"""Serve the metadata of a run over HTTP, in threads; a check may take it away and bring it back."""

import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from halfmoon_metadata.http_server import handle_request
from halfmoon_metadata.metadata_token import metadata_token
from halfmoon_metadata.stores.memory_store import MemoryStore


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a subject that was killed in the middle of a request."""


class MetadataServer:
    """One store behind one port of loopback."""

    def __init__(self, cluster_key: str = "") -> None:
        self.store = MemoryStore()
        self._token = metadata_token(cluster_key)
        self._away = threading.Event()
        self._n_writes: Counter[str] = Counter()
        self._n_answers: Counter[int] = Counter()
        self._server = _QuietServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Return where the tested service finds its metadata."""
        return f"http://127.0.0.1:{self._server.server_port}/metadata"

    def n_writes(self, key: str) -> int:
        """Return how often a record was written."""
        return self._n_writes[key]

    def describe_requests(self) -> str:
        """Say in a sentence what was asked here, for a service that does not register."""
        if not self._n_answers:
            return "No request has come to the metadata server."
        answers = ", ".join(f"{n} with {status}" for status, n in sorted(self._n_answers.items()))
        why = " (401: the request shows no token of the cluster key)" * (401 in self._n_answers)
        return f"The metadata server has answered requests: {answers}{why}."

    def go_away(self, *, forget: bool = False) -> None:
        """Answer nothing but 503 from now on; with `forget`, lose all records."""
        self._away.set()
        if forget:
            for key in self.store.list(""):
                self.store.delete(key)

    def come_back(self) -> None:
        """Answer again."""
        self._away.clear()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer()

            def do_PUT(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def do_DELETE(self) -> None:
                self._answer()

            def log_message(self, format: str, *args: object) -> None:
                pass  # a run's own lines are its output

            def _answer(self) -> None:
                n_bytes = int(self.headers.get("content-length") or 0)
                body = self.rfile.read(n_bytes)
                if len(body) < n_bytes:
                    # The caller was killed in the middle: nothing is stored of it.
                    self.close_connection = True
                    return
                status, headers, answer = served.answer(
                    self.command,
                    self.path,
                    {name.lower(): value for name, value in self.headers.items()},
                    body,
                )
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        return Handler

    def answer(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Answer one request: status, headers and body."""
        answered = self._answer(method, target, headers, body)
        self._n_answers[answered[0]] += 1
        return answered

    def _answer(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        if self._away.is_set():
            return 503, {}, b"away"
        if self._token and headers.get("authorization") != f"Bearer {self._token}":
            return 401, {"www-authenticate": "Bearer"}, b"show the token of the cluster key"
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        path = parts.path.removeprefix("/metadata")
        if method == "PUT":
            self._n_writes[query.get("key", "")] += 1
        response = handle_request(self.store, method, path, query, headers, body)
        return response.status, response.headers, response.body
