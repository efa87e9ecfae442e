"""Generate by stock vLLM, as a program of its own: `LLM.generate`, with its own scheduler.

It prints one line of JSON for each model: tokens, or the text of an error.
"""

import gc
import json
import sys
from collections.abc import Sequence


def answer(folder: str, prompt: Sequence[int], n_new: int, block_size: int) -> list[int] | str:
    """Return a model's greedy tokens, or why vLLM computes none."""
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True, detokenize=False)
    try:
        stock = LLM(
            folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=block_size,
            max_model_len=1024,
            max_num_seqs=4,
            kv_cache_memory_bytes=64 << 20,
            gpu_memory_utilization=0.05,
        )
        (done,) = stock.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return list(done.outputs[0].token_ids)
    except Exception as error:
        return str(error)


def main() -> None:
    """Read a prompt, a number of tokens, a block size and folders from the arguments."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    prompt, n_new, block_size, *folders = sys.argv[1:]
    for folder in folders:
        found = answer(folder, json.loads(prompt), int(n_new), int(block_size))
        print(json.dumps({folder: found}), flush=True)
        # A model that failed leaves its process groups to the next one, and ends them under it.
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
