"""The table of what our code relies on inside of vLLM: true of this release, and able to fail.

It is read in a process of its own: vLLM's import changes classes of transformers, with which other
tests compare.
"""

import json
import subprocess
import sys

from halfmoon_engine_vllm.compatibility import CONNECTOR, ENGINE
from halfmoon_vllm.vllm_version import VLLM_VERSION

_PRINT_MOVE_AND_LOOK = """
import dataclasses, json
from halfmoon_engine_vllm.compatibility import CONNECTOR, ENGINE, differences, main

print("status", main())

import vllm.v1.core.sched.output as output
import vllm.v1.engine.core as core
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.executor.abstract import Executor

def collective_rpc(self, method, timeout=None, args=(), kwargs=None): ...
def get_finished(self, finished_req_ids, now): ...

Executor.collective_rpc = collective_rpc
KVConnectorBase_V1.get_finished = get_finished
del core.resolve_kv_cache_layout
output.CachedRequestData = dataclasses.make_dataclass(
    "CachedRequestData", ["req_ids", "resumed_req_ids", "num_computed_tokens"]
)
print(json.dumps(differences([*ENGINE, *CONNECTOR])))
"""


def test_this_release_is_as_expected_and_what_moves_is_named_in_order() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PRINT_MOVE_AND_LOOK], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    table, _, moved = ran.stdout.strip().rpartition("\n")
    assert table.endswith("\nstatus 0"), table
    assert f"{VLLM_VERSION} is the supported release" in table
    assert table.count("  same  ") == len(ENGINE) + len(CONNECTOR)
    assert json.loads(moved) == [
        "vllm.v1.engine.core.resolve_kv_cache_layout: `resolve_kv_cache_layout` of "
        "vllm.v1.engine.core is gone",
        "vllm.v1.executor.abstract.Executor.collective_rpc: parameter `non_block` is gone",
        "vllm.v1.core.sched.output.CachedRequestData: attribute `new_block_ids` is gone",
        "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.get_finished: "
        "parameter `now` is new",
    ]
