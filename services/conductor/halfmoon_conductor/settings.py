"""Settings of a conductor."""

from typing import Annotated

from pydantic import Field

from halfmoon_runtime.settings import ServiceSettings
from halfmoon_scheduling.config import AdmissionMode, PlacementMode, SchedulingConfig

#: `metadata` says this when the conductor is to serve the metadata store itself.
EMBEDDED = "embedded"


class ConductorSettings(ServiceSettings):
    """One conductor: where it listens, which model it speaks for, how it decides."""

    worker_id: str = Field("conductor-0", description="Stable name of this conductor")
    metadata: str = Field(
        EMBEDDED,
        description="Metadata server: redis://host:port/0, http://host:port/metadata, or"
        " embedded, which serves one at /metadata of this conductor's own HTTP port",
    )
    http_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8000, description="TCP port of the REST API; 0 takes a free one"
    )
    model: str = Field(
        description="Folder or hub id with the model's tokenizer, or fake://…, as the workers have"
    )
    served_model_name: str = Field(
        "", description="Name of the model as clients write it; empty: what the workers say"
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(
        8 * 1024 * 1024, description="Bytes of a request's body at the most"
    )
    placement: PlacementMode = Field(
        "kvcache_centric", description="How a prefill worker is chosen"
    )
    kvcache_balancing_threshold: Annotated[float, Field(ge=1)] = Field(
        SchedulingConfig().kvcache_balancing_threshold,
        description="A worker's own cached prefix is good enough while the best one elsewhere"
        " is at most so many times as long (kvcache_centric)",
    )
    admission: AdmissionMode = Field(
        "early", description="Whether requests whose predicted latency misses an SLO are refused"
    )
    ttft_slo_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest acceptable time to first token, seconds; unset: no limit"
    )
    tbt_slo_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest acceptable time between tokens, seconds; unset: no limit"
    )
    request_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds until a request that got no first token is given up"
    )
    drain_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="Seconds to finish requests after being told to stop"
    )

    @property
    def scheduling(self) -> SchedulingConfig:
        """What the scheduling core needs of these."""
        return SchedulingConfig(
            placement=self.placement,
            kvcache_balancing_threshold=self.kvcache_balancing_threshold,
            admission=self.admission,
            ttft_slo_s=self.ttft_slo_s,
            tbt_slo_s=self.tbt_slo_s,
            request_timeout_s=self.request_timeout_s,
        )
