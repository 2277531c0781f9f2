"""OpenVINO GenAI's ContinuousBatchingPipeline, bf16 or int8 weights, dynamic split-fuse, no prefix cache.

Concurrency is limited here: with split-fuse on it ignores `max_num_seqs`, so a request is added only when another ends.
It computes in bf16 where the processor does, else in fp32: other processors refuse a cache in bf16.
"""

from collections.abc import Callable

import numpy
import openvino
import openvino_genai
from serve import Work


def open_engine(work: Work) -> Callable[[], int]:
    """Load the exported model."""
    folder = f"{work.model}-openvino-{work.weights}"
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = work.max_num_batched_tokens
    scheduler.max_num_seqs = work.max_num_seqs
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 2
    has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "bf16" if has_bf16 else "f32"
    settings = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision, "INFERENCE_NUM_THREADS": 2}
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings)
    return lambda: _run(pipeline, work)


def _run(pipeline: openvino_genai.ContinuousBatchingPipeline, work: Work) -> int:
    waiting = list(enumerate(work.requests))[::-1]
    running, num_tokens = [], 0
    while waiting or running:
        while waiting and len(running) < work.max_num_seqs:
            number, (prompt, count) = waiting.pop()
            config = openvino_genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
            ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            running.append(pipeline.add_request(number, ids, config))
        pipeline.step()
        ended = [request for request in running if request.get_status() == openvino_genai.GenerationStatus.FINISHED]
        for request in ended:
            num_tokens += sum(len(output.generated_ids) for output in request.read_all())
        running = [request for request in running if request not in ended]
    return num_tokens
