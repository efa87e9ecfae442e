"""NIXL over UCX; UCX_TLS in the environment says whether that is TCP or shared memory."""

import base64
import os
import subprocess
import sys

import numpy as np
from measure import ROOM, measure
from nixl._api import nixl_agent, nixl_agent_config


def open_agent(name: str) -> tuple[nixl_agent, np.ndarray]:
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = np.ones(ROOM, np.uint8)
    agent.register_memory([(memory.ctypes.data, ROOM, 0, "")], mem_type="DRAM")
    return agent, memory


if sys.argv[1] == "target":
    agent, memory = open_agent("target")
    text = base64.b64encode(agent.get_agent_metadata()).decode()
    print("TARGET", memory.ctypes.data, text, flush=True)
    sys.stdin.read()
    os._exit(0)

child = subprocess.Popen(
    [sys.executable, __file__, "target"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
)
while not (line := child.stdout.readline()).startswith("TARGET"):
    assert line, "the target ended"
_, address, text = line.split()
agent, memory = open_agent("initiator")
peer = agent.add_remote_agent(base64.b64decode(text))
local, remote = memory.ctypes.data, int(address)
#: Made once and posted again and again, as NIXL's users do.
handles = {}


def move(op: str, size: int, n_blocks: int) -> None:
    handle = handles.get((op, size, n_blocks))
    if handle is None:
        here = [(local + index * size, size, 0) for index in range(n_blocks)]
        there = [(remote + ROOM - (index + 1) * size, size, 0) for index in range(n_blocks)]
        handle = handles[op, size, n_blocks] = agent.initialize_xfer(
            op.upper(),
            agent.get_xfer_descs(here, mem_type="DRAM"),
            agent.get_xfer_descs(there, mem_type="DRAM"),
            peer,
        )
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"state {state}")


measure(move, [child.pid])
child.stdin.close()
child.wait()
os._exit(0)
