"""Peer: the continuous batching of `transformers`. Arguments: model directory, number of threads."""

import sys
import time

import torch
from protocol import serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig


def main() -> None:
    directory, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    # No token is -1: every request runs to its limit.
    generation = GenerationConfig(
        max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=2, use_cuda_graph=False
    )
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=1024)
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    manager.start()

    def run(prompts: list[list[int]], num_new: int) -> tuple[float, int]:
        open_ids = {manager.add_request(prompt, max_new_tokens=num_new, streaming=True) for prompt in prompts}
        first, num_tokens = 0.0, 0
        while open_ids:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped")
                continue
            first = first or time.perf_counter()
            if result.request_id in open_ids and result.is_finished():
                open_ids.remove(result.request_id)
                num_tokens += len(result.generated_tokens)
        return first, num_tokens

    serve(run)
    manager.stop(block=True)


if __name__ == "__main__":
    main()
