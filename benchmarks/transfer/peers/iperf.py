"""iperf3, one stream, blocks of this size; it has no single blocks to time and none over 1 MiB."""

import json
import socket
import subprocess
import time

from measure import MIB, arguments

ops, sizes, seconds = arguments()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def run(op: str, size: int) -> dict[str, float]:
    """What the client reports of one run; `-R` has the server send."""
    port = str(free_port())
    with subprocess.Popen(
        ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port, "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            time.sleep(0.01)
        lasts = ["-t", str(max(1, round(seconds)))]
        reverse = ["-R"] if op == "read" else []
        done = subprocess.run(
            ["iperf3", "-c", "127.0.0.1", "-p", port, "-J", "-l", str(size), *lasts, *reverse],
            capture_output=True,
            text=True,
            check=True,
        )
    end = json.loads(done.stdout)["end"]
    received, busy = end["sum_received"], end["cpu_utilization_percent"]
    cpu_s = (busy["host_total"] + busy["remote_total"]) / 100 * received["seconds"]
    n_gb = received["bytes"] / 1e9
    return {"gb_per_s": n_gb / received["seconds"], "cpu_s_per_gb": cpu_s / n_gb}


for op in ops:
    for size in sizes:
        try:
            result: dict[str, float | str] = (
                {**run(op, size)} if size <= MIB else {"error": "iperf3 takes at most 1 MiB"}
            )
        except (OSError, subprocess.CalledProcessError, KeyError) as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"op": op, "size": size} | result), flush=True)
