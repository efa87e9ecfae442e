"""Define the settings of a decode worker."""

from typing import Annotated

from pydantic import Field

from halfmoon_runtime.engine_settings import EngineSettings


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
