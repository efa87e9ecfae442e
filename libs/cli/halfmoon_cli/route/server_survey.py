"""Ask servers what they serve, and check that one conductor can route among them."""

import asyncio
from collections.abc import Sequence

from halfmoon_protocol.blocks import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from halfmoon_servers.bridge.server_supervisor import bridge_layout
from halfmoon_servers.bridge.server_target import ServerTarget
from halfmoon_servers.client.server_client import ServerClient
from halfmoon_servers.client.server_description import ServerDescription
from halfmoon_servers.client.server_errors import ServerError, ServerRefused


class UnfitServers(Exception):
    """Servers that can't be routed among; the text names a server, the fact and the way out."""


def survey_servers(targets: Sequence[ServerTarget], api_key: str) -> list[ServerDescription]:
    """Return the servers' descriptions, in order.

    Raises:
        UnfitServers: one can't be reached or read, or two serve different models.
    """
    descriptions = asyncio.run(_describe_all(targets, api_key))
    check_alike(descriptions)
    return descriptions


def check_alike(descriptions: Sequence[ServerDescription]) -> None:
    """Check that servers can serve the same requests.

    Raises:
        UnfitServers: they differ in model or block size.
    """
    first = descriptions[0]
    for other in descriptions[1:]:
        if other.model != first.model:
            raise UnfitServers(
                f"{first.url} serves {first.model!r} and {other.url} serves {other.model!r}: all"
                " servers of one route serve one model; run a route for each, or give the servers"
                " one --served-model-name"
            )
    stated: ServerDescription | None = None
    for each in descriptions:
        if each.block_size is None or not MIN_BLOCK_SIZE <= each.block_size <= MAX_BLOCK_SIZE:
            continue
        stated = stated or each
        if each.block_size != stated.block_size:
            raise UnfitServers(
                f"block_size is {stated.block_size} at {stated.url} and {each.block_size} at"
                f" {each.url}: start them with the same --block-size"
            )


def common_block_size(descriptions: Sequence[ServerDescription]) -> int:
    """Return the tokens of a block of all servers: as those state that state an allowed size."""
    for each in descriptions:
        size = bridge_layout(each).block_size
        if size == each.block_size:
            return size
    return bridge_layout(descriptions[0]).block_size


async def _describe_all(targets: Sequence[ServerTarget], api_key: str) -> list[ServerDescription]:
    return list(await asyncio.gather(*(_describe(target, api_key) for target in targets)))


async def _describe(target: ServerTarget, api_key: str) -> ServerDescription:
    async with ServerClient(target.url, api_key=api_key or None) as client:
        try:
            return await client.describe()
        except ServerRefused as error:
            hint = "check its URL"
            if error.status in (401, 403):
                hint = "put the key that it wants into HALFMOON_SERVER_API_KEY"
            raise UnfitServers(f"{error}; {hint}") from None
        except ServerError as error:
            raise UnfitServers(f"{error}; start it, or leave it out") from None
