"""Define the settings of a conductor."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from halfmoon_runtime.observability.tracer_setup import TracedSettings
from halfmoon_runtime.own_address import is_loopback, resolve_own_address
from halfmoon_scheduling.admission_modes import ADMISSION_MODES
from halfmoon_scheduling.config import MAX_QUANTILE, SchedulingConfig
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES

#: Value of `metadata` with which the conductor serves the metadata store itself.
EMBEDDED = "embedded"


def _names_of(aliases: str) -> tuple[str, ...]:
    return tuple(name for name in (each.strip() for each in aliases.split(",")) if name)


def _check_aliases(aliases: str) -> str:
    """Refuse a pattern that would be taken for a plain name."""
    for name in _names_of(aliases):
        if "*" in name[:-1]:
            raise ValueError(f"{name!r} has a * before its end; only the last character may be one")
    return aliases


def _check_trace_url(url: str) -> str:
    """Refuse what is no web address of a trace."""
    if url and not (url.startswith(("http://", "https://")) and "{trace_id}" in url):
        raise ValueError(f"{url!r} must begin with http:// or https:// and contain {{trace_id}}")
    return url


class ConductorSettings(TracedSettings):
    """Settings of one conductor: where it listens, which model it serves, how it schedules."""

    worker_id: str = Field("conductor-0", description="Stable name of this conductor")
    metadata: str = Field(
        EMBEDDED,
        description="Metadata server: redis://host:port/0, etcd://host:2379,"
        " http://host:port/metadata, or embedded, which serves one at /metadata of this"
        " conductor's metadata port",
    )
    metadata_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        7999, description="TCP port of the embedded metadata server; 0 takes a free one"
    )
    metadata_host: str = Field(
        "", description="Address that the embedded metadata server listens on; empty: as host"
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
    model_aliases: Annotated[str, AfterValidator(_check_aliases)] = Field(
        "",
        description="Other names of the model, separated by commas; claude-* is any that begins so",
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json"] = Field(
        "auto",
        description="How the model writes calls of tools; auto: as its chat template shows",
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        "auto",
        description="What is told apart from answers as reasoning: think, what is between <think>"
        " and </think>; none; auto, as the model's chat template shows",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Sampling defaults of requests that leave fields out: auto, what the model's"
        " generation_config.json states; none, OpenAI's",
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(
        8 * 1024 * 1024, description="Bytes of a request's body at the most"
    )
    max_bodies_mib: Annotated[int, Field(ge=1)] = Field(
        1024, description="MiB of all bodies at the most that are being read at once"
    )
    body_timeout_s: Annotated[float, Field(gt=0)] = Field(
        30.0, description="Seconds without a byte of a body after which its request is refused"
    )
    keep_alive_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        75.0,
        description="Seconds that an idle connection of a client is kept; longer than a load"
        " balancer before the conductor keeps it",
    )
    max_concurrent: Annotated[int, Field(ge=1)] = Field(
        4096, description="Requests being answered at once, streams included"
    )
    resume_window_s: Annotated[float, Field(ge=0)] = Field(
        30.0,
        description="Seconds that a stream with Idempotency-Key is kept, and goes on, while its"
        " client is away; 0: it ends, and is computed again for a client that comes back",
    )
    resume_streams: Annotated[int, Field(ge=1)] = Field(
        1024, description="Such streams that are kept at the most; ended and old ones go first"
    )
    resume_mib: Annotated[int, Field(ge=1)] = Field(
        64, description="MiB of their events at the most; ended and old ones go first"
    )
    response_ttl_s: Annotated[float, Field(ge=0, le=2_592_000)] = Field(
        3600.0,
        description="Seconds for which answers of /v1/responses are stored, in a Redis that is the"
        " metadata server, else in memory; 0: none is",
    )
    response_mib: Annotated[int, Field(ge=1, le=2**20)] = Field(
        64, description="MiB of them at the most for each tenant; the oldest go first"
    )
    decode_stall_s: Annotated[float, Field(ge=0)] = Field(
        300.0,
        description="Seconds without a token after which a decode worker with running requests"
        " counts as hanging: they go on elsewhere, and it rests; 0: no limit",
    )
    tenants: str = Field(
        "", description="File of tenants and hashes of their API keys; empty: no key is needed"
    )
    cors_origins: str = Field(
        "", description="Origins, separated by commas, whose pages may call from a browser"
    )
    placement: Annotated[str, AfterValidator(PLACEMENT_MODES.check)] = Field(
        "kvcache_centric",
        description=f"How a prefill worker is chosen: {PLACEMENT_MODES.names}",
    )
    kvcache_balancing_threshold: Annotated[float, Field(ge=1)] = Field(
        SchedulingConfig().kvcache_balancing_threshold,
        description="A worker's own cached prefix is good enough while the best one elsewhere"
        " is at most so many times as long (kvcache_centric)",
    )
    group_least_gain: Annotated[float, Field(ge=1)] = Field(
        SchedulingConfig().group_least_gain,
        description="A prompt goes to a group if a single worker takes at least so many times as"
        " long, since a group keeps all members busy",
    )
    admission: Annotated[str, AfterValidator(ADMISSION_MODES.check)] = Field(
        "lookahead",
        description="By which predictions requests must keep their limits to be let in:"
        f" {ADMISSION_MODES.names}",
    )
    ttft_slo_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest acceptable time to first token, seconds; unset: no limit"
    )
    tbt_slo_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest acceptable time between tokens, seconds; unset: no limit"
    )
    ttft_slo_multiple: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="The same as a multiple of an idle worker's time, where no seconds are set",
    )
    tbt_slo_multiple: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="The same as a multiple of an idle worker's time, where no seconds are set",
    )
    admission_quantile: Annotated[float, Field(ge=0, le=MAX_QUANTILE)] = Field(
        0.9,
        description="Share of the admitted requests that shall keep each limit, by earlier"
        " predictions' errors; 0: the mean prediction counts",
    )
    max_queued_requests: Annotated[int, Field(ge=1)] | None = Field(
        SchedulingConfig().max_queued_requests,
        description="Requests that wait for their first token at the most; further ones are"
        " refused with 429. Unset: no limit",
    )
    max_queue_s: Annotated[float, Field(gt=0)] | None = Field(
        SchedulingConfig().max_queue_s,
        description="Seconds of queue at the most, as predicted, behind which a request is"
        " admitted; with more it is refused with 429. Unset: no limit",
    )
    double_check: bool = Field(
        False, description="Look at decode's load once more when a prefill is done"
    )
    shares_decode: bool = Field(
        SchedulingConfig().shares_decode,
        description="Stop the newest request of the tenant with the most at decode for one of"
        " another tenant that finds no room there; it goes on later",
    )
    max_deferred: Annotated[int, Field(ge=0)] | None = Field(
        SchedulingConfig().max_deferred,
        description="Requests held back at the most, rather than refused, while decode is busy;"
        " unset: 1,000 with admission lookahead, none otherwise",
    )
    defer_s: Annotated[float, Field(ge=0)] = Field(
        SchedulingConfig().defer_s, description="Seconds that a request is held back at the most"
    )
    replication_bytes_per_s: Annotated[float, Field(ge=0)] = Field(
        SchedulingConfig().replication_bytes_per_s,
        description="Bytes per second at the most that kvstores are asked to copy of hot prefixes,"
        " ahead of requests; 0: none",
    )
    replication_hot_uses: Annotated[float, Field(gt=0)] = Field(
        SchedulingConfig().replication_hot_uses,
        description="Uses within a half-life for which a prefix gets one holder more",
    )
    replication_half_life_s: Annotated[float, Field(gt=0)] = Field(
        SchedulingConfig().replication_half_life_s,
        description="Seconds in which a use comes to count half",
    )
    role_changes: bool = Field(
        False, description="Tell workers that can to change between prefill and decode"
    )
    role_lasting_s: Annotated[float, Field(ge=0)] = Field(
        SchedulingConfig().role_lasting_s,
        description="Seconds that one side must be the busier one before a worker changes",
    )
    role_rest_s: Annotated[float, Field(ge=0)] = Field(
        SchedulingConfig().role_rest_s,
        description="Seconds after a change in which none follows",
    )
    request_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds until a request that got no first token is given up"
    )
    kept_decision_mib: Annotated[int, Field(ge=0, le=2**20)] = Field(
        SchedulingConfig().kept_decision_bytes // 2**20,
        description="Memory for the decisions that /debug/decisions explains, in MiB; the oldest"
        " go first",
    )
    trace_url: Annotated[str, AfterValidator(_check_trace_url)] = Field(
        "",
        description="Where the page finds a trace, as http://127.0.0.1:16686/trace/{trace_id};"
        " empty: no links",
    )
    journal_path: str = Field(
        "", description="File for a journal of all events and commands; empty: none is kept"
    )
    journal_max_mib: Annotated[int, Field(ge=1)] = Field(
        1024,
        description="MiB at which the journal ends; it has hashes of prompts, no tokens",
    )
    drain_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="Seconds to finish requests after the signal to stop"
    )

    @field_validator("metadata_host")
    @classmethod
    def _is_an_own_address(cls, host: str) -> str:
        return resolve_own_address(host)

    @property
    def other_model_names(self) -> tuple[str, ...]:
        """The names of `model_aliases`."""
        return _names_of(self.model_aliases)

    @property
    def open_addresses(self) -> dict[str, str]:
        """As for other services; of a conductor's ports only embedded metadata is for peers."""
        if self.metadata != EMBEDDED or self.cluster_key.get_secret_value():
            return {}
        name = "metadata_host" if self.metadata_host else "host"
        return {} if is_loopback(self.metadata_bind) else {name: self.metadata_bind}

    @property
    def metadata_bind(self) -> str:
        """Address that the embedded metadata server listens on."""
        return self.metadata_host or self.host

    @property
    def scheduling(self) -> SchedulingConfig:
        """The settings of the scheduling core."""
        return SchedulingConfig(
            placement=self.placement,
            kvcache_balancing_threshold=self.kvcache_balancing_threshold,
            group_least_gain=self.group_least_gain,
            admission=self.admission,
            ttft_slo_s=self.ttft_slo_s,
            tbt_slo_s=self.tbt_slo_s,
            ttft_slo_multiple=self.ttft_slo_multiple,
            tbt_slo_multiple=self.tbt_slo_multiple,
            admission_quantile=self.admission_quantile,
            max_queued_requests=self.max_queued_requests,
            max_queue_s=self.max_queue_s,
            double_check=self.double_check,
            shares_decode=self.shares_decode,
            max_deferred=self.max_deferred,
            defer_s=self.defer_s,
            kept_decision_bytes=self.kept_decision_mib * 2**20,
            replication_bytes_per_s=self.replication_bytes_per_s,
            replication_hot_uses=self.replication_hot_uses,
            replication_half_life_s=self.replication_half_life_s,
            role_changes=self.role_changes,
            role_lasting_s=self.role_lasting_s,
            role_rest_s=self.role_rest_s,
            request_timeout_s=self.request_timeout_s,
        )
