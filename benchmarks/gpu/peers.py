"""Peers compared with ours, in the same run and at the same inputs: section "peers" of `benchmarks gpu`.

Whole engines: nano-vllm's requests, and transformers' continuous batching. Attention: flashinfer's over the same
blocks, and torch's FlexAttention. A peer that is missing, fails or takes too long gives a line that says so; only one
whose attention differs from ours is wrong.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any  # peers' types differ by version, or are absent

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.engine.bare import Job, num_wanted
from benchmarks.gpu.checks.accuracy import Lengths, attend
from benchmarks.gpu.engines import empty_device, options_of, random_folder, shape_of, warm_s
from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.speed.kernels import plain_attention
from sluice.engine.execution.start.model_loading import load_model_runner
from tests.oracles.kernel_cases import AttentionInputs

Theirs = Callable[[], Tensor]
"""Attends: `[T, H, D]`."""

HEADS = (32, 8, 128)
SHAPES: dict[str, Lengths] = {
    "decode, 32 x 2048": ([1] * 32, [2048] * 32),
    "decode, 32 x 8192": ([1] * 32, [8192] * 32),
    "prefill of 8192": ([8192], [8192]),
    "prefills, 16 of 512": ([512] * 16, [512] * 16),
}
"""Name to query lengths and context lengths; the 8B shape."""

COMPILED = ("decode, 32 x 8192", "prefill of 8192")
"""Shapes that FlexAttention is compiled for, which takes as long as everything else."""

NUM_REQUESTS, MAX_OUTPUT_TOKENS = 64, 256
"""Concurrent requests against transformers, and their limit."""

PEER_LIMIT_S = 40.0
"""Time limit of another engine."""


def groups(scale: Scale) -> Groups:
    """Return quick groups first; those that compile or may fail last."""
    return {
        "engines": lambda: _engines(scale),
        "flashinfer": lambda: _flashinfer(scale),
        "flex_attention": lambda: _flex(scale),
    }


def _note(name: str, error: Exception) -> Line:
    """Return the line of a peer that failed: the error's class, and the beginning of its message."""
    return Line(name, {"note": f"cannot: {type(error).__name__}: {error}".splitlines()[0][:120]})


# Engines


def nano_jobs(scale: Scale) -> list[Job]:
    """The requests of nano-vllm's benchmark (bench.py), token by token: 133,966 are requested."""
    random, longest, count = Random(0), 8 if scale.is_toy else 1024, 6 if scale.is_toy else 256
    shortest, num_words = min(100, longest // 2), 300 if scale.is_toy else 10_000

    def prompt() -> tuple[int, ...]:
        return tuple(random.randint(0, num_words - int(scale.is_toy)) for _ in range(random.randint(shortest, longest)))

    prompts = [prompt() for _ in range(count)]
    return [Job(prompt, random.randint(shortest, longest)) for prompt in prompts]


def _engines(scale: Scale) -> Iterator[Line]:
    """Run ours on all of nano-vllm's requests; then the first of them, shortened, compared with transformers."""
    name, jobs = shape_of(scale), nano_jobs(scale)
    some = [
        replace(job, num_output_tokens=min(job.num_output_tokens, MAX_OUTPUT_TOKENS)) for job in jobs[:NUM_REQUESTS]
    ]
    with random_folder(scale) as folder:
        runner = load_model_runner(options_of(scale, folder, max_num_seqs=len(jobs)))
        seconds = warm_s(runner, jobs)
        figures: dict[str, float | str] = {"tokens/s": num_wanted(jobs) / seconds, "output tokens": num_wanted(jobs)}
        yield Line(f"nano-vllm's requests, {name}, {len(jobs)} sequences", figures)
        ours = num_wanted(some) / warm_s(runner, some)
        del runner
        empty_device(scale)
        peer = f"engine compared with generate_batch, {name}, {len(some)} requests"
        try:
            theirs = _generate_batch(scale, folder, some)
        except Exception as error:  # noqa: BLE001 - any error of a peer becomes a line, and ours continue
            yield _note(peer, error)
        else:
            yield Line(peer, {"tokens/s": ours, "theirs": theirs, "times theirs": ours / theirs})


def _generate_batch(scale: Scale, folder: Path, jobs: Sequence[Job]) -> float:
    """Return tokens per second of transformers' continuous batching, on a GPU with the sizes that it chooses itself."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

    batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if scale.is_toy else None
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Other threads use it, which are not in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=scale.dtype, attn_implementation="sdpa")
        with model.to(scale.device).continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
        ) as manager:
            _collect(manager, [replace(job, num_output_tokens=4) for job in jobs[:2]])
            began_s = time.perf_counter()
            return _collect(manager, jobs) / (time.perf_counter() - began_s)


def _collect(manager: Any, jobs: Sequence[Job]) -> int:  # noqa: ANN401 - transformers'
    """Generate jobs; return the tokens of those that ended in time.

    Raises:
        RuntimeError: none did.
    """
    until_s = time.monotonic() + PEER_LIMIT_S
    for job in jobs:
        manager.add_request(list(job.prompt), max_new_tokens=job.num_output_tokens)
    num_tokens, num_done = 0, 0
    while num_done < len(jobs) and time.monotonic() < until_s:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            num_done += 1
            num_tokens += len(result.generated_tokens)
    if num_tokens == 0:
        raise RuntimeError(f"no request ended within {PEER_LIMIT_S:g} s")
    return num_tokens


# Attention


def _flashinfer(scale: Scale) -> Iterator[Line]:
    """Its first use may compile for minutes."""
    if find_spec("flashinfer") is None:
        yield Line("flashinfer", {"note": "not present: the package flashinfer"})
    elif scale.is_toy:
        yield Line("flashinfer", {"note": "not run: it needs a GPU"})
    else:
        yield from _compared(scale, "flashinfer", SHAPES, flashinfer)


def _flex(scale: Scale) -> Iterator[Line]:
    shapes = {"toy prefill": ([16], [16])} if scale.is_toy else {name: SHAPES[name] for name in COMPILED}
    return _compared(scale, "flex_attention", shapes, flex)


def _compared(
    scale: Scale, peer: str, shapes: Mapping[str, Lengths], make: Callable[[AttentionInputs], Theirs]
) -> Iterator[Line]:
    """Yield times of both for each shape; wrong if their results differ by more than roundings."""
    for shape, lens in shapes.items():
        inputs = plain_attention(scale, *lens, (4, 2, 16) if scale.is_toy else HEADS)
        before = torch.cuda.current_stream() if scale.device.type == "cuda" else None
        try:
            theirs, ours, out = make(inputs), attend(inputs).float(), torch.empty_like(inputs.query)
            error = float((theirs().float() - ours).square().mean().sqrt() / ours.square().mean().sqrt())
            us, our_us = scale.timer.device_us(theirs), scale.timer.device_us(lambda i=inputs, o=out: attend(i, o))
        except Exception as error:  # noqa: BLE001 - any error of a peer becomes a line, and the others continue
            if before is not None:
                # A capture that cannot be ended leaves its stream current.
                torch.cuda.set_stream(before)
            yield _note(f"{peer}, {shape}", error)
        else:
            # Both round weights and results to 8 bits: half a per cent.
            figures = {"us": us, "us of ours": our_us, "times ours": us / our_us, "differs by": error}
            yield Line(f"{peer}, {shape}", figures, error < 0.02)


def flex(inputs: AttentionInputs) -> Theirs:
    """Return FlexAttention, for equal sequences; compiled on a GPU, where it would not be one kernel otherwise."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, keys, values = (x.view(len(inputs.context_lens), -1, *x.shape[1:]).transpose(1, 2).contiguous() for x in (
        inputs.query, *_keys_and_values(inputs)
    ))  # fmt: skip
    attention: Any = torch.compile(flex_attention, dynamic=False) if keys.is_cuda else flex_attention
    query_len, context_len = inputs.max_query_len, inputs.max_context_len

    def is_seen(_sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + (context_len - query_len)

    mask = create_block_mask(is_seen, None, None, query_len, context_len, device=keys.device) if query_len > 1 else None
    return lambda: attention(query, keys, values, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)


def _keys_and_values(inputs: AttentionInputs) -> Iterator[Tensor]:
    """Return keys and values of all sequences in order, contiguous: `[K, G, D]` each."""
    lens, block_size = inputs.context_lens.tolist(), inputs.kv_cache.block_size
    for cache in (inputs.kv_cache.keys, inputs.kv_cache.values):
        rows = zip(inputs.block_tables, lens, strict=True)
        yield torch.cat([cache[table[: -(-n // block_size)].long()].flatten(0, 1)[:n] for table, n in rows])


def flashinfer(inputs: AttentionInputs) -> Theirs:
    """Return flashinfer's attention over the same blocks, planned."""
    package: Any = import_module("flashinfer")
    cache, device = inputs.kv_cache, inputs.query.device
    workspace = torch.empty(2**28, dtype=torch.uint8, device=device)
    # The documented form: [blocks, 2, G, block_size, D].
    memory = torch.stack([cache.keys.transpose(1, 2), cache.values.transpose(1, 2)], dim=1)
    lens, size = inputs.context_lens.cpu(), cache.block_size
    blocks = -(-lens // size)
    ends = pad(blocks.cumsum(0), (1, 0)).int()
    ids = torch.cat([row[:n] for row, n in zip(inputs.block_tables, blocks.tolist(), strict=True)])
    tables = (ends.to(device), ids, (lens - (blocks - 1) * size).int().to(device))
    kinds: dict[str, object] = {"q_data_type": inputs.query.dtype, "kv_data_type": inputs.query.dtype}
    if inputs.max_query_len == 1:
        wrapper = package.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*tables, *HEADS, size, **kinds)
    else:
        wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(inputs.query_start_locs, *tables, *HEADS, size, causal=True, **kinds)
    return lambda: wrapper.run(inputs.query, memory)
