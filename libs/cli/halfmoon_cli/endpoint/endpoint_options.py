"""Declare the flags that all commands with an endpoint have: `--url`, `--model`, and so on."""

from typing import Annotated

import typer

from halfmoon_cli.endpoint.endpoint_address import KEY_VARIABLE, URL_VARIABLES
from halfmoon_metadata.tls_trust import TLS_CA_VARIABLE

Url = Annotated[
    str,
    typer.Option(envvar=URL_VARIABLES, help="The endpoint; a URL without a path gets /v1"),
]
Key = Annotated[str, typer.Option(envvar=KEY_VARIABLE, help="Sent as a bearer token")]
TlsCa = Annotated[
    str,
    typer.Option(
        "--tls-ca",
        envvar=TLS_CA_VARIABLE,
        help="PEM file of CAs to trust at an https URL, besides the system's",
    ),
]
Model = Annotated[str, typer.Option(help="The model's name; without it: the first of /v1/models")]
