"""Define the settings of a decode worker."""

from typing import Annotated, ClassVar

from pydantic import Field

from halfmoon_protocol.messages import Role
from halfmoon_workers.start.worker_settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """The settings of one decode worker: the size of its batch, and its waits for KV."""

    starting_role: ClassVar[Role] = "decode"

    worker_id: str = Field("decode-0", description="Stable name of this worker in the cluster")
    max_running: Annotated[int, Field(ge=1)] = Field(
        64, description="Requests in the continuous batch at the most, landings included"
    )
    landing_ttl_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds until pages reserved for a prefill's KV are given up"
    )
    quarantine_s: Annotated[float, Field(ge=0)] = Field(
        6.0,
        description="Seconds that a landing's pages rest when its writer may not know of its end,"
        " and has the pool's own key",
    )

    keep_answers: bool = Field(
        True, description="Put the KV of answers into a kvstore, for the next turn to read"
    )
    keep_pages: bool = Field(
        True,
        description="Find the KV of earlier requests in free pages, so that prefill sends the"
        " rest of a prompt only",
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
    local_prefill_tbt_s: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="Mean seconds between tokens that such parts leave to running requests: steps"
        " between two parts make up for them; 0: a part before every step",
    )
