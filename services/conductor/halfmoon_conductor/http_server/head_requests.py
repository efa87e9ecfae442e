"""Answer HEAD as GET is answered, without the body (RFC 9110, section 9.3.2)."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def serve_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a HEAD request by an app's GET routes; the headers are theirs, the length included."""

    async def send_without_body(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    await app({**scope, "method": "GET"}, receive, send_without_body)
