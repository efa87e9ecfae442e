"""Define `halfmoon roles`: show the roles of workers, and pin a worker to one."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from halfmoon_cli.common.printable_text import printable
from halfmoon_cli.endpoint.endpoint_address import (
    DEFAULT_URL,
    ApiEndpoint,
    parse_endpoint,
)
from halfmoon_cli.endpoint.endpoint_errors import BadEndpointUrl, EndpointError
from halfmoon_cli.endpoint.endpoint_options import Key, TlsCa, Url
from halfmoon_cli.endpoint.operator_key import operator_key
from halfmoon_cli.roles.role_responses import RoleChanged, RoleRow, RolesAnswer
from halfmoon_cli.roles.role_table import describe_change, render_roles
from halfmoon_scheduling.events import RequestedRole

if TYPE_CHECKING:
    import httpx

app = typer.Typer(invoke_without_command=True)
console = Console(highlight=False)

#: Seconds without a byte after which the conductor is given up.
_SILENCE_S = 5.0
Json = Annotated[bool, typer.Option("--json", help="Print what the conductor says, for programs")]


@app.callback()
def roles(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
    tls_ca: TlsCa = "",
    as_json: Json = False,
) -> None:
    """Show which worker prefills and which decodes, and change it.

    Without a command: a table of workers with their roles, pins and loads, and the change that the
    conductor makes next. Workers started with --roles prefill,decode can have both roles.
    """
    if context.invoked_subcommand is not None:
        context.obj = (url, api_key, tls_ca)
        return
    from halfmoon_cli.roles.role_client import fetch_roles, parse_answer

    with _opened(url, api_key, tls_ca) as (client, endpoint):
        data = fetch_roles(client, endpoint)
        if as_json:
            _print_json(data)
        else:
            console.print(render_roles(parse_answer(data, RolesAnswer, endpoint)), soft_wrap=True)


@app.command("set")
def set_role(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(help="Its name, as `halfmoon roles` shows it")],
    role: Annotated[
        RequestedRole, typer.Argument(help="A role to keep; auto: the conductor chooses again")
    ],
    url: Url = DEFAULT_URL,
    api_key: Key = "",
    tls_ca: TlsCa = "",
    as_json: Json = False,
) -> None:
    """Pin a worker to a role, or release it with auto.

    A worker that changes finishes its requests, and comes back in the other role with the model
    that it has loaded. The conductor does not change it again until auto releases it. A worker that
    refuses, for example within its --role-cooldown-s, is asked again every 10 s.
    """
    from halfmoon_cli.roles.role_client import parse_answer, request_role

    # They may stand before `set`, too.
    url = url if _is_given(context, "url") else context.obj[0]
    api_key = api_key if _is_given(context, "api_key") else context.obj[1]
    tls_ca = tls_ca if _is_given(context, "tls_ca") else context.obj[2]
    with _opened(url, api_key, tls_ca) as (client, endpoint):
        data = request_role(client, endpoint, worker, role)
        if as_json:
            _print_json(data)
            return
        row = parse_answer(data, RoleChanged, endpoint).worker
    console.print(Text(printable(_said(worker, role, row))), soft_wrap=True)


def _is_given(context: typer.Context, name: str) -> bool:
    """Return whether an option stands behind `set`, and is no default or variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _said(worker: str, role: RequestedRole, row: RoleRow | None) -> str:
    """Say what follows from a request that was not refused."""
    if role == "auto":
        return f"{worker} is released: it keeps its role until the conductor changes it"
    change = "" if row is None else describe_change(row)
    pinned = f"{worker} is pinned to {role}, until `halfmoon roles set {worker} auto`"
    return f"{pinned} ({change})" if change else f"{pinned} (it has this role)"


@contextmanager
def _opened(url: str, api_key: str, tls_ca: str) -> Iterator[tuple["httpx.Client", ApiEndpoint]]:
    """Yield a client of a conductor; print errors in one line and exit, with 2 for a bad URL."""
    from halfmoon_cli.endpoint.endpoint_client import open_client

    try:
        endpoint = parse_endpoint(url, operator_key(url, api_key), tls_ca)
        with open_client(endpoint, _SILENCE_S) as client:
            yield client, endpoint
    except BadEndpointUrl as error:
        _give_up(str(error), 2)
    except EndpointError as error:
        _give_up(str(error), 1)


def _print_json(data: object) -> None:
    json.dump(data, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _give_up(message: str, status: int) -> NoReturn:
    errors = Console(stderr=True)
    errors.print(Text.assemble(("halfmoon: ", "red"), printable(message)), soft_wrap=True)
    raise typer.Exit(status)
