"""Peer: vLLM for CPUs, its asynchronous engine. Arguments: float32 directory in Hugging Face's form, threads."""

import asyncio
import os
import sys
import threading
import time

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

from protocol import serve
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


def main() -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    arguments = AsyncEngineArgs(
        model=sys.argv[1], dtype="float32", max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=2048,
        disable_log_stats=True,
    )  # fmt: skip

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(arguments)

    engine = asyncio.run_coroutine_threadsafe(start(), loop).result()
    next_id = 0

    async def one(prompt: list[int], num_new: int, number: int, first: list[float]) -> int:
        params = SamplingParams(
            temperature=0, max_tokens=num_new, min_tokens=num_new, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        count = 0
        async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, request_id=str(number)):
            if not first:
                first.append(time.perf_counter())
            count += len(output.outputs[0].token_ids)
        return count

    def run(prompts: list[list[int]], num_new: int) -> tuple[float, int]:
        nonlocal next_id
        first: list[float] = []
        numbers = range(next_id, next_id + len(prompts))
        next_id += len(prompts)

        async def all_at_once() -> list[int]:
            pairs = zip(prompts, numbers, strict=True)
            return await asyncio.gather(*(one(prompt, num_new, number, first) for prompt, number in pairs))

        counts = asyncio.run_coroutine_threadsafe(all_at_once(), loop).result()
        return first[0], sum(counts)

    serve(run)
    engine.shutdown()


if __name__ == "__main__":
    main()
