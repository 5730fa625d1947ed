"""Peer: continuous batching of OpenVINO GenAI, from a GGUF file: its weights as stored, float32 besides. Arguments: the
file, number of threads."""

import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import serve


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 1, 64, 2048
    scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
    next_id = 0

    def run(prompts: list[list[int]], num_new: int) -> tuple[float, int]:
        nonlocal next_id
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_new, True, False
        handles = []
        for prompt in prompts:
            next_id += 1
            handles.append(pipeline.add_request(next_id, ov.Tensor(np.array([prompt], dtype=np.int64)), config))
        counts, first = [0] * len(handles), 0.0
        while min(counts) < num_new:
            pipeline.step()
            for i, handle in enumerate(handles):
                if counts[i] < num_new and handle.can_read():
                    counts[i] += sum(len(output.generated_ids) for output in handle.read().values())
                    first = first or time.perf_counter()
        return first, sum(counts)

    serve(run)


if __name__ == "__main__":
    main()
