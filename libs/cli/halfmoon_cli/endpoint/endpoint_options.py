"""Declare the flags that all commands with an endpoint have: `--url`, `--model`, `--api-key`."""

from typing import Annotated

import typer

from halfmoon_cli.endpoint.endpoint_address import KEY_VARIABLE, URL_VARIABLES

Url = Annotated[
    str,
    typer.Option(envvar=URL_VARIABLES, help="The endpoint; a URL without a path gets /v1"),
]
Key = Annotated[str, typer.Option(envvar=KEY_VARIABLE, help="Sent as a bearer token")]
Model = Annotated[str, typer.Option(help="The model's name; without it: the first of /v1/models")]
