"""Prompts as prefill workers are told of them."""

from typing import Any

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.messages import KvstoreAddress, StartPrefill
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_scheduling.prefill.prefill_events import PrefillFailure
from halfmoon_testing.scheduling_inputs import a_landing

BLOCK = 16
HOME = KvstoreAddress(worker_id=WorkerId("kvstore-0"), generation=1, commands="a")
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
BROKEN = PrefillFailure("broken", retryable=True)


def a_start(request_id: RequestId = A, n_tokens: int = 40, **fields: Any) -> StartPrefill:
    default: dict[str, Any] = {
        "token_ids": (1,) * n_tokens,
        "n_prompt": n_tokens,
        "block_hashes": tuple(BlockHash(bytes([i]) * 32) for i in range(n_tokens // BLOCK)),
        "landing": a_landing("decode-0"),
        "landing_expires_s": 10.0,
        "sampling": Sampling(),
        "stopping": Stopping(max_new_tokens=10),
    }
    return StartPrefill(request_id=request_id, **(default | fields))
