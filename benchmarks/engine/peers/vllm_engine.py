"""vLLM's engine in this process, scheduler included, without a prefix cache.

Decode is measured over KV that is filled in rather than computed, by vLLM's own connector for
such benchmarks (`DecodeBenchConnector`). For prefill the connector says that nothing is there.
"""

import ctypes
import json
import os
import sys

from serve_operations import Clock, forget_peak, resident_bytes, serve, take_stdout

answers = take_stdout()
given = json.loads(sys.argv[1])
clock = Clock(given["clock"], given["threads"])
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector  # noqa: E402

Fill = decode_bench_connector.DecodeBenchConnectorScheduler
Fills = decode_bench_connector.DecodeBenchConnectorWorker
fill_tokens, register = Fill.get_num_new_matched_tokens, Fills.register_kv_caches
filling = False
kv_tensors, kv_memory = [], {}
held = False


def tokens_to_fill(self, request, n_computed):
    return fill_tokens(self, request, n_computed) if filling else (0, False)


def remember_kv(self, tensors):
    kv_tensors.extend(tensors.values())
    for tensor in kv_tensors:  # they may share one allocation
        storage = tensor.untyped_storage()
        kv_memory[storage.data_ptr()] = storage.nbytes()
    register(self, tensors)


Fill.get_num_new_matched_tokens, Fills.register_kv_caches = tokens_to_fill, remember_kv
BLOCK = given["vllm_page"]
kv_tokens = sum(-(-n // BLOCK) * BLOCK for n in given["sequences"]) + 2 * BLOCK
llm = LLM(
    model=given["model"],
    dtype=given["dtype"],
    enforce_eager=given["eager"],
    enable_prefix_caching=False,
    skip_tokenizer_init=True,
    disable_log_stats=True,
    max_model_len=given["max_context"],
    block_size=BLOCK,
    max_num_batched_tokens=given["vllm_chunk"] or None,
    kv_cache_memory_bytes=kv_tokens * given["kv_token_bytes"],
    kv_transfer_config={"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
)
engine = llm.llm_engine
libc = ctypes.CDLL(None, use_errno=True)
DONT_NEED = 4


def kv_bytes():
    return sum(kv_memory.values())


def hold_pool():
    """Have the KV in memory, so that no step pays for fresh pages."""
    global held
    if not held:
        for tensor in kv_tensors:
            tensor.fill_(0.015)
        held = True


def drop_pool():
    """Give the KV's memory back; it is there again, empty, when it is touched."""
    global held
    page = os.sysconf("SC_PAGE_SIZE")
    for address, n_bytes in kv_memory.items():
        first = -(-address // page) * page
        size = (address + n_bytes - first) // page * page
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), DONT_NEED):
            raise OSError(ctypes.get_errno(), "madvise failed")
    held = False


def run(batch, n, n_new):
    """Seconds of each step from the first to the end of all requests."""
    params = SamplingParams(max_tokens=n_new, ignore_eos=True, temperature=0.0, detokenize=False)
    for i in range(batch):
        ids = [5 + (7 * j + i) % 300 for j in range(n)]
        engine.add_request(f"{i}", {"prompt_token_ids": ids}, params)
    seconds = []
    while engine.has_unfinished_requests():
        seconds.append(clock.seconds(engine.step))
    return seconds


def prefill(n, release=False):
    global filling
    filling = False
    hold_pool()
    forget_peak()
    seconds = clock.repeated(lambda: run(1, n, 1))
    peak = resident_bytes("VmHWM") - kv_bytes()
    if release:
        drop_pool()
    return {"seconds": seconds, "peak_bytes": peak}


def decode(batch, context, steps, release=False):
    global filling
    filling = True
    hold_pool()
    seconds = run(batch, context, steps)
    if len(seconds) > steps + 1:
        raise RuntimeError(f"{len(seconds)} steps for {steps} tokens: the batch did not fit")
    if release:
        drop_pool()
    return {"seconds": seconds[2:]}


prefill(512)
decode(2, 64, 4)
decode(1, 64, 4)
drop_pool()
scheduler = engine.vllm_config.scheduler_config
serve(
    answers,
    {
        "mode": ("enforce-eager" if given["eager"] else "compiled")
        + f", chunks of {scheduler.max_num_batched_tokens}, pages of {BLOCK}",
        "resident_bytes": resident_bytes(),
    },
    {"prefill": prefill, "decode": decode},
)
