"""Answer each request with one event, at the cost of uvicorn alone: a scale for request costs.

python -m benchmarks.echo_server PORT
"""

import sys
from typing import Any

import uvicorn

_HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}
_EVENT = {"type": "http.response.body", "body": b"data: {}\n\n"}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, and answer."""
    while (await receive()).get("more_body"):
        pass
    await send(_HEAD)
    await send({**_EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    uvicorn.run(
        echo,
        host="127.0.0.1",
        port=int(sys.argv[1]),
        loop="uvloop",
        lifespan="off",
        log_config=None,
    )
