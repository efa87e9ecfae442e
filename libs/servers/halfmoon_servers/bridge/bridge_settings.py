"""Define the settings of a process that bridges servers."""

from typing import Annotated

import msgspec
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import CliSuppress

from halfmoon_protocol.blocks import check_block_size
from halfmoon_protocol.errors import ProtocolError
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_servers.bridge.server_target import ServerTarget, check_targets


class BridgeSettings(ServiceSettings):
    """Settings of one bridge: its servers, and how long they may take."""

    worker_id: str = Field("servers-0", description="Stable name of this bridge")
    targets: str = Field(
        description='JSON list of the servers: [{"url": "http://127.0.0.1:8001"}]; with "role"'
        ' prefill or decode for a half of a pair, and "events" and "replay" for the endpoints of'
        " KV events where the server does not tell them"
    )
    server_api_key: CliSuppress[SecretStr] = Field(
        SecretStr(""), description="The key that the servers want, if they want one"
    )
    block_size: Annotated[int, Field(ge=0)] = Field(
        0, description="Tokens per block of all servers; 0: as each server states"
    )
    stall_s: Annotated[float, Field(gt=0)] = Field(
        120.0, description="Seconds between two tokens after which a server's stream has failed"
    )
    answer_s: Annotated[float, Field(gt=0)] = Field(
        5.0, description="Seconds for an answer at /health or /metrics before a server is down"
    )
    drain_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="Seconds for requests to finish after a stop"
    )

    @field_validator("block_size")
    @classmethod
    def _is_allowed(cls, block_size: int) -> int:
        try:
            return check_block_size(block_size) if block_size else 0
        except ProtocolError as error:
            raise ValueError(str(error)) from None

    @field_validator("targets")
    @classmethod
    def _are_servers(cls, targets: str) -> str:
        check_targets(_decode(targets))
        return targets

    @property
    def servers(self) -> list[ServerTarget]:
        """The servers to bridge."""
        return _decode(targets=self.targets)


def _decode(targets: str) -> list[ServerTarget]:
    try:
        return msgspec.json.decode(targets, type=list[ServerTarget])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no JSON list of servers: {error}") from None
