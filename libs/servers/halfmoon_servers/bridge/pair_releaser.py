"""Free the blocks that a prefill server holds for a decode server that won't fetch them.

Without it, vLLM's prefill server holds them for 30 s. A decode server tells it to free them, and
any decode server of the bridge can.
"""

from collections.abc import Mapping
from typing import Any

import structlog

from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_servers.client.generate_call import GenerateCall
from halfmoon_servers.client.server_client import ServerClient
from halfmoon_servers.client.server_errors import ServerError

log = structlog.get_logger()


class PairReleaser:
    """Release blocks through the decode servers of one bridge."""

    def __init__(self) -> None:
        #: Clients of decode servers, asked in this order.
        self.clients: list[ServerClient] = []

    async def release(self, request_id: str, model: str, params: Mapping[str, Any]) -> None:
        """Have a decode server release the blocks that `params` name; a failure is logged."""
        call = GenerateCall(
            request_id=request_id,
            model=model,
            prompt_token_ids=(0,),
            sampling=Sampling(),
            stopping=Stopping(max_new_tokens=1),
            kv_transfer_params=params,
        )
        for client in self.clients:
            try:
                await client.release_pair_prefill(call)
            except ServerError as error:
                log.info("not_released", request_id=request_id, reason=str(error))
            else:
                return
