"""Compare vLLM inside of our engine with vLLM's own: `python -m benchmarks.vllm_engine`.

Both compute the same batches in passes of the same size, over pages of the same size, with the
same threads, both compiled or both eager. See `benchmarks.engine` for all options.
"""

import subprocess
import sys

from benchmarks.engine import __main__ as engine_benchmark
from benchmarks.engine.rounds import OURS_BY_VLLM, VLLM

_CHUNK, _PAGE = 2048, 64
DEFAULTS = (
    f"--systems={OURS_BY_VLLM},{VLLM}",
    f"--chunk={_CHUNK}",
    f"--vllm-chunk={_CHUNK}",
    f"--block-size={_PAGE}",
    f"--vllm-page={_PAGE}",
    "--no-ttft",
)


def main(arguments: list[str]) -> None:
    """Measure what the command line chooses, and print tables."""
    engine_benchmark.main([*DEFAULTS, *arguments])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(map(str, error.cmd))} failed, see above") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
