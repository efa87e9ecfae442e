"""List the units of numbers in messages: the values of `x-unit` in the JSON Schema."""

#: Unit, and what it says.
UNITS = {
    "s": "seconds",
    "bytes": "bytes",
    "tokens": "a number of tokens",
    "blocks": "a number of blocks of KV",
    "pages": "a number of pages of a pool",
    "layers": "a number of layers of a model",
    "requests": "a number of requests",
    "stages": "a number of stages of a group",
    "count": "a number of something else, which the description names",
    "index": "a position, from 0",
    "rank": "a position in an order, from 1",
    "token id": "a token of the model's vocabulary",
    "priority": "an order: larger goes first",
    "version": "a version of the protocol",
    "ratio": "a number without a unit",
    "logit": "what is added to logits",
    "nat": "a natural logarithm of a probability",
    "seed": "bits without an order",
    "hash": "bits without an order",
    "checksum": "bits without an order",
    "s/token": "seconds for each token",
    "s/token²": "seconds for each pair of tokens",
    "s/request": "seconds for each request",
}
