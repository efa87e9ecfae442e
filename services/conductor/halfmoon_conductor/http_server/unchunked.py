"""Answer clients of HTTP/1.0, which know no chunks.

An answer without a length, such as a stream, ends with its connection (RFC 9112, section 6.3).
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unchunked(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Wrap an app for one request, whose answers without a length are written as they are.

    Args:
        cycle: writes the answer; told to close the connection after one without a length.
        app: the app to wrap.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_unchunked(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                has_length = b"content-length" in names
                if not has_length:
                    cycle.chunked_encoding = cycle.keep_alive = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return serve
