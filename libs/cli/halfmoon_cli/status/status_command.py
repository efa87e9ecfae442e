"""Define `halfmoon status`: show a cluster once, repeatedly, or as JSON."""

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from halfmoon_cli.common.printable_text import printable
from halfmoon_cli.common.stop_signals import catch_stop_signals
from halfmoon_cli.endpoint.endpoint_address import (
    DEFAULT_URL,
    ApiEndpoint,
    parse_endpoint,
)
from halfmoon_cli.endpoint.endpoint_errors import BadEndpointUrl, EndpointError
from halfmoon_cli.endpoint.endpoint_options import Key, TlsCa, Url
from halfmoon_cli.endpoint.operator_key import operator_key

if TYPE_CHECKING:
    import httpx

console = Console(highlight=False)

#: Seconds without a byte after which the conductor is given up.
_SILENCE_S = 5.0


def status(
    url: Url = DEFAULT_URL,
    api_key: Key = "",
    tls_ca: TlsCa = "",
    watch: Annotated[bool, typer.Option("--watch", help="Until Ctrl-C")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds, of --watch")] = 2.0,
    decisions: Annotated[int, typer.Option(min=0, help="Show the last so many")] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what the conductor says, for programs")
    ] = False,
) -> None:
    """Show a cluster as its conductor sees it: workers, queues, memory, latencies, decisions."""
    from halfmoon_cli.endpoint.endpoint_client import open_client
    from halfmoon_cli.status.debug_client import fetch_status

    try:
        endpoint = parse_endpoint(url, operator_key(url, api_key), tls_ca)
        with open_client(endpoint, _SILENCE_S) as client:
            if as_json:
                json.dump(fetch_status(client, endpoint), sys.stdout, indent=2)
                sys.stdout.write("\n")
            elif watch:
                _watch(client, endpoint, every, decisions)
            else:
                console.print(_look(client, endpoint, decisions))
    except BadEndpointUrl as error:
        _give_up(str(error), 2)
    except EndpointError as error:
        _give_up(str(error), 1)


def _look(client: "httpx.Client", endpoint: ApiEndpoint, n_decisions: int) -> RenderableType:
    from halfmoon_cli.status.debug_client import fetch_status, parse_status
    from halfmoon_cli.status.status_screen import render_status

    return render_status(
        parse_status(fetch_status(client, endpoint), endpoint), n_decisions=n_decisions
    )


def _watch(client: "httpx.Client", endpoint: ApiEndpoint, every_s: float, n_decisions: int) -> None:
    """Show the cluster until Ctrl-C or SIGTERM. Only the first fetch must succeed."""
    shown = _look(client, endpoint, n_decisions)
    with (
        suppress(KeyboardInterrupt),
        catch_stop_signals(interrupting=True) as stop,
        Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while not stop.wait(every_s):
            try:
                shown = _look(client, endpoint, n_decisions)
            except EndpointError as error:
                shown = Text(printable(str(error)), "red")
            live.update(shown, refresh=True)


def _give_up(message: str, status: int) -> NoReturn:
    errors = Console(stderr=True)
    errors.print(Text.assemble(("halfmoon: ", "red"), printable(message)), soft_wrap=True)
    raise typer.Exit(status)
