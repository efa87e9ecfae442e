"""Ask an endpoint for its models."""

from typing import Any

import httpx

from halfmoon_cli.endpoint.endpoint_address import ApiEndpoint
from halfmoon_cli.endpoint.endpoint_errors import EndpointError, connection_error, refusal_error


def first_model(client: httpx.Client, endpoint: ApiEndpoint) -> str:
    """Return the first model that the endpoint lists.

    Raises:
        EndpointError: it does not answer, or lists none.
    """
    names = list_models(client, endpoint)
    if not names:
        raise EndpointError(f"{endpoint.api}/models lists no model: name one with --model")
    return names[0]


def list_models(client: httpx.Client, endpoint: ApiEndpoint) -> list[str]:
    """Return the models that the endpoint lists.

    Raises:
        EndpointError: it does not answer, or not as an OpenAI endpoint.
    """
    try:
        response = client.get(f"{endpoint.api}/models")
    except httpx.HTTPError as error:
        raise connection_error(endpoint.api, error) from error
    if response.status_code != 200:
        raise refusal_error(response.status_code, response.headers, response.content)
    try:
        return model_names(response.json())
    except ValueError:
        raise EndpointError(
            f"{endpoint.api}/models is no JSON: is this an OpenAI endpoint?"
            " --url or HALFMOON_URL names another"
        ) from None


def model_names(answer: Any) -> list[str]:
    """Return the names in an answer of /v1/models, in its order."""
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list):
        return []
    return [str(each["id"]) for each in data if isinstance(each, dict) and "id" in each]
