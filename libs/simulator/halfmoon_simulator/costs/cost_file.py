"""Read cost files: the modelled costs of a worker's engine, memory and network.

A cost file is JSON with the fields of `CostFile`. Those in `profiles/` come with their source;
`halfmoon profile` writes one of the machine at hand. Times are seconds, sizes bytes.
"""

from importlib.resources import files
from pathlib import Path

import msgspec

from halfmoon_protocol.kv_layout import DType, KvLayout
from halfmoon_protocol.messages import DecodeCost, PrefillCost
from halfmoon_scheduling.prediction.cost_model import unscaled_prefill_s, unscaled_step_s


class BadCosts(ValueError):
    """A cost file that can't be used; the text says which, where and why."""


class CostFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of worker: a model on a machine.

    A prefill pass takes `pass_s`, and c1·(n-p) + c2·(n²-p²) for each of its chunks, from token p to
    token n. A prompt's first chunk takes c0 - `pass_s` more. So a prompt in one pass takes what the
    scheduler's formula says. A decode step over b requests with c context
    tokens in all takes d0 + d1·b + d2·c.
    """

    name: str
    #: Where each figure comes from, a sentence each.
    source: tuple[str, ...]
    prefill: PrefillCost
    #: The part of c0 that every forward pass takes; the rest is taken once per prompt.
    pass_s: float
    decode: DecodeCost
    #: From so many requests in a step on, `decode_large` holds; 0: never.
    large_from: int = 0
    decode_large: DecodeCost | None = None
    # The shape of a token's keys and values.
    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: DType = "float16"
    max_context: int
    #: Memory for KV of one worker's accelerators, and of one host's kvstore.
    device_kv_bytes: int
    host_kv_bytes: int
    #: Activations of one token on their way from one pipeline stage to the next.
    activation_bytes: int = 0
    #: Between hosts, each way, shared by all transfers of a host.
    network_bytes_per_s: float
    #: Between a host's memory and its accelerators, shared likewise.
    local_bytes_per_s: float
    #: A control message's way, end to end.
    message_s: float = 0.0005

    def layout(self, block_tokens: int) -> KvLayout:
        """Return the KV layout of workers with blocks of `block_size` tokens."""
        return KvLayout(
            model=self.name,
            n_layers=self.n_layers,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            block_size=block_tokens,
        )

    def step_s(self, n_requests: int, context_tokens: int) -> float:
        """Return the seconds of one decode step."""
        cost = self.decode
        if self.decode_large is not None and self.large_from and n_requests >= self.large_from:
            cost = self.decode_large
        return unscaled_step_s(cost, n_requests, context_tokens)

    def context_step_s(self, n_requests: int) -> float:
        """Return the seconds that each context token adds to a step of so many requests."""
        return self.step_s(n_requests, 1) - self.step_s(n_requests, 0)

    @property
    def pass_cost(self) -> PrefillCost:
        """Return the cost of one forward pass, without what a prompt takes once."""
        return msgspec.structs.replace(self.prefill, c0_s=self.pass_s)

    @property
    def shared_pass_s(self) -> float:
        """Return the seconds that a prefill pass and a decode step in one pass take once."""
        return min(self.pass_s, self.decode.d0_s)

    def chunk_s(self, start: int, stop: int, *, first: bool) -> float:
        """Return the seconds that one chunk adds to a forward pass; `first`: of its prompt."""
        fixed_s = self.pass_s if first else self.prefill.c0_s
        return unscaled_prefill_s(self.prefill, stop, start) - fixed_s

    def prefill_s(self, n_tokens: int, n_cached: int = 0) -> float:
        """Return the seconds of a whole prompt in one forward pass."""
        return unscaled_prefill_s(self.prefill, n_tokens, n_cached)


def load_costs(name: str) -> CostFile:
    """Load a cost file by the name of an included profile, or by its path.

    Raises:
        BadCosts: no such profile or file, or it does not have the fields of `CostFile`.
    """
    bundled = files("halfmoon_simulator") / "profiles" / f"{name}.json"
    if bundled.is_file():
        text, where = bundled.read_text(), f"profile {name}"
    else:
        path = Path(name)
        if not path.is_file():
            raise BadCosts(f"{name!r} is no file and none of: {', '.join(profile_names())}")
        text, where = path.read_text(), str(path)
    try:
        costs = msgspec.json.decode(text, type=CostFile)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadCosts(f"{where}: {error}") from None
    for field in ("device_kv_bytes", "network_bytes_per_s", "local_bytes_per_s", "max_context"):
        if getattr(costs, field) <= 0:
            raise BadCosts(f"{where}: {field} is {getattr(costs, field)}, it must be above 0")
    return costs


def profile_names() -> list[str]:
    """Return the names of the included profiles."""
    folder = files("halfmoon_simulator") / "profiles"
    return sorted(
        entry.name.removesuffix(".json")
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    )


def dump_costs(costs: CostFile) -> str:
    """Return a cost file as text."""
    return msgspec.json.format(msgspec.json.encode(costs), indent=2).decode() + "\n"
