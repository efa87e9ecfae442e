from collections.abc import Callable, Sequence
from typing import Any

#: Names of what `Decoder.forward` times, in the order of `part_times`.
FORWARD_PARTS: tuple[str, ...]

class Linear:
    """Packed weights of a linear."""

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
    ) -> None:
        """Compute y = multiplier·activation(x·Wᵀ + bias) for n_rows rows."""
    @property
    def n_bytes(self) -> int:
        """Memory of the packed weights."""

class Pool:
    """Memory of KV pages; exported while it lives."""

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
    def n_pages(self) -> int:
        """Whole pages in the memory."""

class Batch:
    """A checked ragged batch over a pool."""

    def __init__(self, pool: Pool, lengths: Any, starts: Any, n_pages: Any, pages: Any) -> None: ...
    @property
    def n_tokens(self) -> int:
        """Tokens of all runs."""

class Decoder:
    """Layers of a decoder, from tokens or activations to logits or activations."""

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
    ) -> None:
        """Append a layer."""
    def set_rope(self, table: int, cosines: Any, sines: Any) -> None:
        """Set the cosines and sines of a table, each [n_positions, n_pairs]."""
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
    ) -> None:
        """Run a batch and write the logits of the chosen rows, which rise.

        Args:
            batch: over the decoder's pool.
            tokens: of the batch.
            rows: whose logits are written.
            n_rows: how many these are.
            logits: are written there.
            before_layer: called with each layer's number, before it.
            after_layer: called with each layer's number, after it.
            part_times: float64, for each of `FORWARD_PARTS` its seconds, and seconds in which
                threads had nothing to do; added to.
            incoming: float32, [n_tokens, hidden], of a decoder without embedding.
            outgoing: float32, [n_tokens, hidden], of a decoder without head.
        """

def write_kv(batch: Batch, layer: int, keys: Any, values: Any) -> None:
    """Store float32 keys and values of a batch in its pool."""

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
) -> None:
    """Compute causal attention of a batch over its pool."""

def linear_unpacked(
    weights: Any, dtype: str, n_out: int, n_in: int, x: Any, y: Any, n_rows: int
) -> None:
    """Compute y = x·Wᵀ over weights that stay row-major."""

def join_pages(pages: Sequence[Sequence[int]], n_pages: int) -> bytearray:
    """Join lists of pages into int32 numbers, each checked to be in a pool."""

def choose_tokens(scores: Any, n_vocab: int, rows: Sequence[tuple[Any, ...]]) -> list[int]:
    """Choose a token for each row of scores.

    A row: (log2(e) / temperature or 0, min-p's gap, top-k, top-p, die, biases, penalties, allowed).
    The last three may be None: ((token, bias), …); (history, tokens of the prompt in it,
    repetition, presence, frequency); a byte for each token. Scores are float32, changed meanwhile
    and restored.
    """

def score_tokens(
    scores: Any, n_vocab: int, tokens: Sequence[int], n_top: int
) -> list[tuple[float, int, tuple[tuple[int, float], ...]] | None]:
    """Compute log probabilities of a token of each row and of the likeliest ones.

    Returns:
        Of each row (log probability, rank, ((token, log probability), …)); None where its highest
        score is no finite number.
    """

def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that this processor has kernels for, best first."""

def instruction_set() -> str:
    """Return the instruction set in use."""

def use_instruction_set(name: str, /) -> None:
    """Use another instruction set."""

def set_threads(n: int, /) -> None:
    """Compute on so many threads, the caller's included."""

def threads() -> int:
    """Return the number of threads."""
