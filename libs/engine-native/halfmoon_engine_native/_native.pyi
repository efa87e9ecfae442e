from collections.abc import Callable, Sequence
from typing import Any

FORWARD_PARTS: tuple[str, ...]

class Linear:
    def __init__(
        self,
        weights: Any,
        dtype: str,
        n_out: int,
        n_in: int,
        bias: Any | None = None,
        gated: bool = False,
    ) -> None: ...
    def run(
        self,
        x: Any,
        y: Any,
        n_rows: int,
        activation: str = "none",
        accumulate: bool = False,
        multiplier: float = 1.0,
    ) -> None: ...
    @property
    def n_bytes(self) -> int: ...

class Pool:
    def __init__(
        self,
        memory: Any,
        dtype: str,
        n_layers: int,
        block_size: int,
        n_kv_heads: int,
        head_dim: int,
    ) -> None: ...
    @property
    def n_pages(self) -> int: ...

class Batch:
    def __init__(self, pool: Pool, lengths: Any, starts: Any, n_pages: Any, pages: Any) -> None: ...
    @property
    def n_tokens(self) -> int: ...

class Decoder:
    def __init__(
        self,
        hidden: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        n_pairs: int,
        embedding: Any,
        n_vocab: int,
        embedding_dtype: str,
        head: Any,
        n_logits: int,
        head_dtype: str,
        final_norm: Any,
        interleaved: bool = False,
        parallel: bool = False,
        residual_multiplier: float = 1.0,
        embedding_scale: float = 1.0,
        first_layer: int = 0,
    ) -> None: ...
    def add_layer(
        self,
        norm: Any,
        qkv: Linear,
        q_norm: Any,
        k_norm: Any,
        rope: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: Any,
        out: Linear,
        out_norm: Any,
        mlp_norm: Any,
        up: Linear,
        activation: str,
        down: Linear,
        mlp_out_norm: Any,
    ) -> None: ...
    def set_rope(self, table: int, cosines: Any, sines: Any) -> None: ...
    def forward(
        self,
        batch: Batch,
        tokens: Any,
        rows: Any,
        n_rows: int,
        logits: Any,
        before_layer: Callable[[int], None] | None = None,
        after_layer: Callable[[int], None] | None = None,
        part_times: Any | None = None,
        incoming: Any | None = None,
        outgoing: Any | None = None,
    ) -> None: ...

def write_kv(batch: Batch, layer: int, keys: Any, values: Any) -> None: ...
def attend(
    batch: Batch,
    layer: int,
    queries: Any,
    out: Any,
    n_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Any | None = None,
) -> None: ...
def linear_unpacked(
    weights: Any, dtype: str, n_out: int, n_in: int, x: Any, y: Any, n_rows: int
) -> None: ...
def join_pages(pages: Sequence[Sequence[int]], n_pages: int) -> bytearray: ...

# A row: (log2(e) / temperature or 0, min-p's gap, top-k, top-p, die, biases, penalties, allowed).
# The last three may be None: ((token, bias), …); (history, tokens of the prompt in it, repetition,
# presence, frequency); a byte for each token. Scores are float32, changed meanwhile and restored.
def choose_tokens(scores: Any, n_vocab: int, rows: Sequence[tuple[Any, ...]]) -> list[int]: ...

# Of each row (log probability, rank, ((token, log probability), …)); None where its highest score
# is no finite number.
def score_tokens(
    scores: Any, n_vocab: int, tokens: Sequence[int], n_top: int
) -> list[tuple[float, int, tuple[tuple[int, float], ...]] | None]: ...
def instruction_sets() -> tuple[str, ...]: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str, /) -> None: ...
def set_threads(n: int, /) -> None: ...
def threads() -> int: ...
