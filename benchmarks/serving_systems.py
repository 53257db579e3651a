"""One serving system on one workload, in a process of its own; what bench_serving.py starts, stage by stage.

    python benchmarks/serving_systems.py pagedkv S bfloat16 build/serving/model

The last line it prints is the result, as JSON. One thread; all systems load the same weights and have
KV memory for the same number of tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving_workloads import KV_TOKENS, MAX_LEN, NUM_SLOTS, WORKLOADS, Item

os.environ["HF_HUB_OFFLINE"] = "1"

# Small blocks where sequences are short; documents are read alike with any.
BLOCK_SIZES = {"S": 8, "D": 16, "B": 16}
MAX_BATCH_TOKENS = 512
VLLM_BLOCK_SIZE = 32

Result = dict[str, Any]
Run = Callable[[list[Item]], Result]


def load_model(path: Path, dtype: str) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


def occupancy(samples: list[tuple[float, int, int, int]]) -> Result:
    """Of samples (seconds, blocks used, slots filled, branches), each valid until the next.

    Utilisation is filled slots over the slots of used blocks, averaged over time.
    """
    spans = [(b[0] - a[0], a) for a, b in itertools.pairwise(samples)]
    total = sum(span for span, _ in spans)
    weighted = sum(span * filled / slots for span, (_, slots, filled, _) in spans if slots > 0)
    return {
        "utilization": weighted / max(total, 1e-9),
        "mean_concurrency": sum(span * sample[3] for span, sample in spans) / max(total, 1e-9),
        "peak_concurrency": max((sample[3] for sample in samples), default=0),
        "samples": [[round(sample[0], 3), *sample[1:]] for sample in samples],
    }


def pagedkv_system(mode: str, path: Path, workload: str, dtype: str) -> Run:
    """Our generator: paged, or with one contiguous block of the longest length for each of the slots.

    "traditional" admits eight requests and takes the next when all of them are done, "slots" fills a slot as
    soon as it is free. Both compute no padding, and no rows that have ended: less than such schemes do.
    """
    from pagedkv.generation import Generator
    from pagedkv.integrations.llama import RaggedLlama
    from pagedkv.integrations.ragged import make_cache

    model = load_model(path, dtype)
    block_size = BLOCK_SIZES[workload] if mode == "pagedkv" else MAX_LEN
    cache = make_cache(
        model, num_blocks=KV_TOKENS // block_size, block_size=block_size, prefix_caching=mode == "pagedkv"
    )
    for pool in (*cache.key_caches, *cache.value_caches):
        pool.zero_()  # the system hands the memory out now, as it does when vLLM starts
    runner = RaggedLlama(model, cache, max_positions=MAX_LEN)
    group_size = NUM_SLOTS if mode == "traditional" else None

    def run(items: list[Item]) -> Result:
        limit = {"max_num_seqs": NUM_SLOTS} if mode == "slots" else {}
        generator = Generator(runner, cache, max_batch_tokens=MAX_BATCH_TOKENS, reserve=1.0, **limit)
        samples: list[tuple[float, int, int, int]] = []
        begin = time.process_time()
        for first in range(0, len(items), group_size or len(items)):
            for item in items[first : first + (group_size or len(items))]:
                generator.submit(item.prompt, max_new_tokens=item.num_tokens)
            while generator.num_running + generator.num_waiting > 0:
                generator.step()
                stats = cache.stats()
                num_slots = stats.num_used * block_size
                filled = round(stats.utilization * num_slots)
                samples.append((time.process_time() - begin, num_slots, filled, generator.num_running))
        stats, counts = cache.stats(), generator.stats
        return {
            **occupancy(samples),
            "hit_rate": stats.hit_rate,
            "preemptions": counts.num_preemptions,
            "steps": counts.num_steps,
            "num_tokens": counts.num_new_tokens,
        }

    return run


def transformers_static(path: Path, dtype: str) -> Run:
    """`generate` in batches of eight, padded on the left, with sdpa."""
    import torch

    model = load_model(path, dtype)
    model.generation_config.eos_token_id = None

    def run(items: list[Item]) -> Result:
        for first in range(0, len(items), NUM_SLOTS):
            batch = items[first : first + NUM_SLOTS]
            width = max(len(item.prompt) for item in batch)
            ids = torch.tensor([[0] * (width - len(item.prompt)) + item.prompt for item in batch])
            model.generate(
                ids,
                attention_mask=(ids > 0).long(),
                max_new_tokens=max(item.num_tokens for item in batch),
                do_sample=False,
                pad_token_id=0,
            )
        return {"num_tokens": sum(item.num_tokens for item in items)}

    return run


def transformers_batch(path: Path, dtype: str) -> Run:
    """Transformers' own continuous batching, with sdpa and pages of 32."""
    import transformers

    model = load_model(path, dtype)
    model.set_attn_implementation("sdpa")

    def run(items: list[Item]) -> Result:
        with model.continuous_batching_context_manager(
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=32, num_blocks=KV_TOKENS // 32, max_batch_tokens=MAX_BATCH_TOKENS
            ),
        ) as manager:
            for item in items:
                manager.add_request(item.prompt, max_new_tokens=item.num_tokens)
            outputs = [manager.get_result(timeout=600) for _ in items]
        return {"num_tokens": sum(len(output.generated_tokens) for output in outputs if output is not None)}

    return run


def vllm_engine(path: Path, dtype: str) -> Run:
    """The CPU engine of vLLM with prefix caching and a pool of the same number of tokens."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else its time is another process's
    for name, value in (("KVCACHE_SPACE", "1"), ("OMP_THREADS_BIND", "nobind")):
        os.environ.setdefault(f"VLLM_CPU_{name}", value)
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(path),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=MAX_LEN,
        block_size=VLLM_BLOCK_SIZE,
        num_gpu_blocks_override=KV_TOKENS // VLLM_BLOCK_SIZE,
        enable_prefix_caching=True,
    )

    def run(items: list[Item]) -> Result:
        engine.reset_prefix_cache()
        outputs = engine.generate(
            [{"prompt_token_ids": item.prompt} for item in items],
            [
                SamplingParams(temperature=0, max_tokens=item.num_tokens, ignore_eos=True, detokenize=False)
                for item in items
            ],
            use_tqdm=False,
        )
        return {"num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    return run


def main() -> None:
    """Warm up, run once, print the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("system")
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("dtype", choices=["bfloat16", "float32"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", type=int, help="only that many requests")
    arguments = parser.parse_args()
    makers: dict[str, Callable[[], Run]] = {
        "transformers": lambda: transformers_static(arguments.model, arguments.dtype),
        "generate_batch": lambda: transformers_batch(arguments.model, arguments.dtype),
        "vllm": lambda: vllm_engine(arguments.model, arguments.dtype),
        **{
            mode: lambda mode=mode: pagedkv_system(mode, arguments.model, arguments.workload, arguments.dtype)
            for mode in ("pagedkv", "traditional", "slots")
        },
    }
    import torch

    torch.set_num_threads(1)
    run = makers[arguments.system]()
    run([Item(list(range(1000, 1040 + 16 * i)), 8) for i in range(8)])
    items = WORKLOADS[arguments.workload]()[: arguments.limit]
    wall, cpu = time.perf_counter(), time.process_time()
    result = run(items)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    expected = sum(item.num_tokens for item in items)
    if result["num_tokens"] != expected and arguments.system != "pagedkv":
        raise SystemExit(f"{result['num_tokens']} tokens came, {expected} were asked for")
    print(json.dumps({"requests": len(items), "tokens": expected, "wall_s": wall, "cpu_s": cpu, **result}))


if __name__ == "__main__":
    main()
