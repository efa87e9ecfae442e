"""Write the requests of a prefill/decode pair of stock vLLM servers with NixlConnector.

The prefill server computes the prompt, holds its blocks and answers with `kv_transfer_params`. The
decode server gets these as they are, reads the blocks and generates. Source: vLLM 0.32.0,
``distributed/kv_transfer/kv_connector/v1/nixl``.
"""

from typing import Any

from halfmoon_servers.client.generate_call import GenerateCall
from halfmoon_servers.client.server_bodies import completions_body

_AT_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(call: GenerateCall) -> dict[str, Any]:
    """Return the body for the prefill server: the same request for one token, not streamed."""
    body = completions_body(call)
    del body["stream_options"]
    body |= {
        "stream": False,
        "max_tokens": 1,
        "min_tokens": min(body["min_tokens"], 1),
        "kv_transfer_params": _AT_PREFILL,
    }
    return body


def release_body(call: GenerateCall) -> dict[str, Any]:
    """Return the body by which a decode server lets the prefill server free a prompt's blocks.

    The decode server refuses it, since it can't stream a beam search. A refused request with
    `kv_transfer_params` makes it notify the prefill server, before its engine sees anything
    (``GenerateBaseServing._with_kv_transfer_rejection_cleanup``).
    """
    return {
        "model": call.model,
        "prompt": [0],
        "max_tokens": 1,
        "stream": True,
        "use_beam_search": True,
        "kv_transfer_params": call.kv_transfer_params,
    }
