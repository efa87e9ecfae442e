"""Write the body of a request for a server, and refuse what the server can't do.

vLLM and others get ``/v1/completions`` with token ids; SGLang gets its own ``/generate``.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from halfmoon_protocol.sampling import Sampling
from halfmoon_servers.client.generate_call import GenerateCall
from halfmoon_servers.client.server_description import ServerDescription
from halfmoon_servers.client.server_errors import NotServable

COMPLETIONS = "/v1/completions"
SGLANG_GENERATE = "/generate"
#: SGLang keeps caches apart by `extra_key` since before this version.
_SGLANG_WITH_SALTS = (0, 5, 4)
_SGLANG_MAX_REPETITION_PENALTY = 2.0
_JSON_GRAMMAR = re.compile(r"start: %json (\{.*\})", re.DOTALL)


def check_servable(server: ServerDescription, call: GenerateCall) -> None:
    """Check that a server can do what a request asks.

    Raises:
        NotServable: it can't; the text names the field.
    """
    sampling = call.sampling
    if sampling.prompt_logprobs is not None:
        raise NotServable(
            server.url, "prompt_logprobs", "servers don't stream them; leave the field out"
        )
    if sampling.grammar and _schema(sampling.grammar) is None:
        raise NotServable(
            server.url,
            "grammar",
            "servers take a JSON schema only, no regular expression, choice or Lark grammar",
        )
    if sampling.grammar and call.stopping.masks:
        raise NotServable(
            server.url,
            "min_tokens",
            "servers mask an answer's end even where its grammar allows nothing else; leave out "
            "min_tokens or the grammar",
        )
    if call.kv_transfer_params is not None:
        _check_pair(server, call, call.kv_transfer_params)
    if server.kind == "sglang":
        _check_sglang(server, call)


def completions_body(call: GenerateCall) -> dict[str, Any]:
    """Return the body for ``/v1/completions``, with vLLM's fields."""
    sampling, stopping = call.sampling, call.stopping
    body: dict[str, Any] = {
        "model": call.model,
        "prompt": call.prompt_token_ids,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": stopping.max_new_tokens,
        "min_tokens": min(stopping.min_new_tokens, stopping.max_new_tokens),
        "stop_token_ids": stopping.stop_token_ids,
        # Stop tokens are all in `stop_token_ids`, the model's own among them.
        "ignore_eos": True,
        "skip_special_tokens": False,
        **_common_sampling(sampling),
    }
    if sampling.temperature > 0:
        body["seed"] = sampling.seed
    if sampling.logprobs is not None:
        body["logprobs"] = sampling.logprobs
        body["return_tokens_as_token_ids"] = True
    if sampling.grammar:
        body["structured_outputs"] = {"json": _schema(sampling.grammar)}
    if call.salt:
        body["cache_salt"] = call.salt
    if call.kv_transfer_params is not None:
        body["kv_transfer_params"] = call.kv_transfer_params
    return body


def sglang_body(call: GenerateCall) -> dict[str, Any]:
    """Return the body for SGLang's ``/generate``."""
    sampling, stopping = call.sampling, call.stopping
    parameters: dict[str, Any] = {
        "max_new_tokens": stopping.max_new_tokens,
        "min_new_tokens": min(stopping.min_new_tokens, stopping.max_new_tokens),
        "stop_token_ids": stopping.stop_token_ids,
        # Without it, SGLang stops at the model's own tokens too; with it, at none at all.
        "ignore_eos": not stopping.stop_token_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        **_common_sampling(sampling),
    }
    parameters["top_k"] = sampling.top_k or -1
    if sampling.temperature > 0:
        parameters["sampling_seed"] = sampling.seed
    if sampling.grammar:
        schema = _schema(sampling.grammar)
        parameters["json_schema"] = msgspec.json.encode(schema).decode()
    body: dict[str, Any] = {
        "rid": call.request_id,
        "input_ids": call.prompt_token_ids,
        "stream": True,
        "sampling_params": parameters,
    }
    if sampling.logprobs is not None:
        body["return_logprob"] = True
        body["top_logprobs_num"] = sampling.logprobs
    if call.salt:
        body["extra_key"] = call.salt
    return body


def _common_sampling(sampling: Sampling) -> dict[str, Any]:
    """Return the fields that both servers name alike; each is sent, since servers have defaults."""
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return fields


def _check_pair(server: ServerDescription, call: GenerateCall, params: Mapping[str, Any]) -> None:
    """Check that the blocks are those of this prompt: vLLM 0.32 crashes where they are fewer."""
    if server.kind != "vllm":
        raise NotServable(server.url, "kv_transfer_params", "only vLLM servers form such pairs")
    n_held, n_prompt = params.get("remote_num_tokens"), len(call.prompt_token_ids)
    if n_held is not None and n_held != n_prompt:
        raise NotServable(
            server.url,
            "kv_transfer_params",
            f"the prefill server holds {n_held} tokens, the prompt has {n_prompt}; compute it anew",
        )


def _check_sglang(server: ServerDescription, call: GenerateCall) -> None:
    if call.sampling.repetition_penalty > _SGLANG_MAX_REPETITION_PENALTY:
        raise NotServable(
            server.url,
            "repetition_penalty",
            f"is {call.sampling.repetition_penalty}, SGLang takes up to "
            f"{_SGLANG_MAX_REPETITION_PENALTY}",
        )
    if call.salt and _version(server.version) < _SGLANG_WITH_SALTS:
        least = ".".join(map(str, _SGLANG_WITH_SALTS))
        raise NotServable(
            server.url,
            "cache_salt",
            f"SGLang {server.version or 'of unknown version'} may share cached prefixes; "
            f"{least} and later keep them apart",
        )


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", text)
    return tuple(map(int, found.groups())) if found else (0,)


def _schema(grammar: str) -> Any | None:
    """Return the JSON schema of a grammar that is one and nothing more; None: it is another one."""
    if (found := _JSON_GRAMMAR.fullmatch(grammar)) is None:
        return None
    try:
        schema = msgspec.json.decode(found[1])
    except (msgspec.DecodeError, RecursionError):
        return None
    schema.pop("x-guidance", None)  # the conductor's own rule for blanks
    return schema
