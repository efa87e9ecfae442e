"""Describe the measured models: shapes, and the work that a forward of each takes. No I/O."""

from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["float32", "bfloat16"]
ITEM_BYTES: dict[Precision, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with grouped-query attention and a gated MLP."""

    name: str
    #: `model_type` of transformers.
    kind: Literal["llama", "qwen3"]
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate: int
    n_vocab: int
    #: The head is the embedding's matrix.
    tied: bool
    max_context: int = 16_384

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of one layer."""
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def read_parameters(self) -> int:
        """Parameters that a decode step reads: all matrices but an untied embedding's."""
        return self.n_layers * self.layer_parameters + self.n_vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of all matrices."""
        return self.read_parameters + (0 if self.tied else self.n_vocab * self.hidden)

    def kv_token_bytes(self, precision: Precision) -> int:
        """Bytes of keys and values of one token, of all layers."""
        width = self.n_kv_heads * self.head_dim
        return 2 * self.n_layers * width * ITEM_BYTES[precision]

    def prefill_flops(self, n_tokens: int) -> int:
        """Operations of a prompt without cached tokens, whose last token draws one.

        Causal attention: the token at position i makes two products over i + 1 tokens, each of
        2·n_heads·head_dim operations a token. Norms and activations are not counted.
        """
        matrices = 2 * self.n_layers * self.layer_parameters * n_tokens
        pairs = n_tokens * (n_tokens + 1) // 2
        attention = 4 * self.n_layers * self.n_heads * self.head_dim * pairs
        return matrices + attention + 2 * self.n_vocab * self.hidden

    def decode_bytes(self, batch: int, context: int, precision: Precision) -> int:
        """Bytes that a step of `batch` requests must read: weights once, each request's KV."""
        weights = self.read_parameters * ITEM_BYTES[precision]
        return weights + batch * context * self.kv_token_bytes(precision)

    def config(self) -> dict[str, Any]:
        """Return the fields of its config.json, for transformers."""
        return {
            "vocab_size": self.n_vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_context,
            "tie_word_embeddings": self.tied,
        }


SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-8x512", "llama", 8, 512, 8, 4, 64, 1536, 32_000, tied=False),
        #: Twice the layers: a group of two computes half of them at its first stage.
        ModelShape("llama-16x512", "llama", 16, 512, 8, 4, 64, 1536, 32_000, tied=False),
        ModelShape("qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, 151_936, tied=True),
        #: 3.4 million parameters, for loads on live servers.
        ModelShape("llama-3.4m", "llama", 4, 256, 4, 2, 64, 512, 4096, tied=True),
    )
}
