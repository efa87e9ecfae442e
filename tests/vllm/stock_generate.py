"""Generate by stock vLLM, as a program of its own: `LLM.generate`, with its own scheduler.

It prints one line of JSON for each model: tokens, or the text of an error.
"""

import gc
import json
import sys


def main() -> None:
    """Read a prompt, a number of tokens and folders from the arguments."""
    from vllm import LLM, SamplingParams

    prompt, n_new, block_size, *folders = sys.argv[1:]
    sampling = SamplingParams(
        temperature=0, max_tokens=int(n_new), ignore_eos=True, detokenize=False
    )
    for folder in folders:
        try:
            stock = LLM(
                folder,
                skip_tokenizer_init=True,
                enforce_eager=True,
                block_size=int(block_size),
                max_model_len=1024,
                max_num_seqs=4,
                kv_cache_memory_bytes=64 << 20,
                gpu_memory_utilization=0.05,
            )
            asked = [{"prompt_token_ids": json.loads(prompt)}]
            (answer,) = stock.generate(asked, sampling, use_tqdm=False)
            print(json.dumps({folder: list(answer.outputs[0].token_ids)}), flush=True)
            del stock
            gc.collect()
        except Exception as error:
            print(json.dumps({folder: str(error)}), flush=True)


if __name__ == "__main__":
    main()
