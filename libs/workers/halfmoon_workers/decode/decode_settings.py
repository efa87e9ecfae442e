"""Define the settings of a decode worker."""

from typing import Annotated

from pydantic import Field, field_validator

from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_transfer.backends.backend_choices import check_backend_choices


class DecodeSettings(EngineSettings):
    """The settings of one decode worker: the size of its batch, and its waits for KV."""

    worker_id: str = Field("decode-0", description="Stable name of this worker in the cluster")
    max_running: Annotated[int, Field(ge=1)] = Field(
        64, description="Requests in the continuous batch at the most, landings included"
    )
    landing_ttl_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds until pages reserved for a prefill's KV are given up"
    )
    quarantine_s: Annotated[float, Field(ge=0)] = Field(
        2.0,
        description="Seconds that a landing's pages rest when its writer was lost, not stopped",
    )

    keep_answers: bool = Field(
        True, description="Put the KV of answers into a kvstore, for the next turn to read"
    )
    local_prefill_tokens: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Tokens at the most of a prompt's uncached rest that this worker prefills by"
        " itself, between steps of its batch; 0: none",
    )
    local_prefill_step_s: Annotated[float, Field(gt=0)] = Field(
        0.2,
        description="Predicted seconds at the most of a step and of the part of a prompt that is"
        " computed before it; a part has a block at the least",
    )
    kvstore_timeout_s: Annotated[float, Field(gt=0)] = Field(
        2.0, description="Seconds to wait for a kvstore's answer before doing without it"
    )
    kvstore_read_s: Annotated[float, Field(gt=0)] = Field(
        5.0,
        description="Seconds to wait for the next layer of cached blocks before they are read"
        " from another kvstore, or computed",
    )

    @field_validator("transfer_backends")
    @classmethod
    def _are_registered(cls, choices: str) -> str:
        return check_backend_choices(choices)

    @field_validator("roles")
    @classmethod
    def _include_decode(cls, roles: str) -> str:
        if roles and "decode" not in roles.split(","):
            raise ValueError(f"this service starts as decode: write decode,{roles}")
        return roles
