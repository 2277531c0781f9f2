"""Models for GPU benchmarks: decoders of random weights created on the device, and small ones for transformers."""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.report import Line
from sluice.engine.config import EngineConfig
from sluice.engine.execution.kv_cache import make_caches
from sluice.engine.execution.layout import BatchLayout
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.slots import Slots
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.models.config import DecoderConfig, parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.engine.models.weights import Weights
from sluice.engine.null_model import NullTokenizer
from sluice.engine.request import Request, Sampling
from sluice.engine.sequence import Sequence as EngineSequence
from sluice.engine.sequence import batch_of
from sluice.kernels import chain
from sluice.kernels.copy_blocks import BlockRuns
from sluice.kernels.decoder_step import StepInputs
from tests.oracles.block_copies import on_device

SHAPES: dict[str, dict[str, object]] = {
    name: {
        "model_type": family, "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "head_dim": heads[2], "tie_word_embeddings": name != "8B",
    }
    for name, family, vocab, hidden, inner, layers, heads in (
        ("toy", "qwen3", 300, 64, 96, 2, (4, 2, 16)),
        ("0.6B", "qwen3", 151_936, 1024, 3072, 28, (16, 8, 128)),
        ("1B", "llama", 128_256, 2048, 8192, 16, (32, 8, 64)),
        ("8B", "llama", 128_256, 4096, 14_336, 32, (32, 8, 128)),
    )
}  # fmt: skip
"""A toy, Qwen3-0.6B, Llama-3.2-1B and Llama-3.1-8B."""


class RandomWeights:
    """Substitute for a folder's weights: any name is a random tensor, small enough to keep activations finite."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator(device=device).manual_seed(0)
        self._dtype = dtype

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of `shape`: ones for a norm, else normal with variance 1 / fan-in."""
        device = self._generator.device
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=device)
        weight = torch.empty(shape, dtype=self._dtype, device=device)
        return weight.normal_(0, shape[-1] ** -0.5, generator=self._generator)

    def packed(self, name: str, shape: tuple[int, ...]) -> None:
        """Have no matrix in groups."""

    def num_rows(self, name: str) -> int:
        """Return that a tensor which need not be there is not."""
        return 0


def random_decoder(shape: str, device: torch.device, *, max_model_len: int, max_tokens: int) -> Decoder:
    """Return a bfloat16 decoder of one of `SHAPES` (float32 on the CPU) with random weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # What only files have is not used here.
    weights = cast("Weights", RandomWeights(device, dtype))
    config = parse_config(SHAPES[shape] | {"max_position_embeddings": max_model_len})
    return load_decoder(
        config, weights, form=WeightForm(dtype, device), max_model_len=max_model_len, max_tokens=max_tokens
    )


def weight_bytes(config: DecoderConfig, element_bytes: int) -> int:
    """Return bytes of weights that a decode step reads: every product and the output projection, not the embedding."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_size
    per_layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return element_bytes * (config.num_layers * per_layer + config.vocab_size * config.hidden_size)


def cache_bytes_per_token(config: DecoderConfig, element_bytes: int) -> int:
    """Return bytes of keys and values of one token, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_size * element_bytes


def decode_tensors(batch_size: int, context_len: int, block_size: int, device: torch.device) -> StepInputs:
    """Return a decode step of equal sequences."""
    return step_tensors([1] * batch_size, [context_len] * batch_size, block_size, device)


def step_tensors(query_lens: list[int], context_lens: list[int], block_size: int, device: torch.device) -> StepInputs:
    """Return a step in which every sequence samples, with blocks assigned at random."""
    blocks_each = [-(-length // block_size) for length in context_lens]
    dealt = torch.randperm(sum(blocks_each), generator=torch.Generator().manual_seed(0)).split(blocks_each)
    tables = torch.nn.utils.rnn.pad_sequence(list(dealt), batch_first=True)
    ends = torch.tensor([0, *query_lens]).cumsum(0)
    lens = zip(query_lens, context_lens, strict=True)
    positions = torch.cat([torch.arange(context_len - query_len, context_len) for query_len, context_len in lens])
    rows = torch.arange(len(query_lens)).repeat_interleave(torch.tensor(query_lens))
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    return StepInputs(
        input_ids=(torch.arange(len(positions)) % 256).to(device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        block_tables=tables.to(device, torch.int32),
        query_start_locs=ends.to(device, torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        logit_rows=(ends[1:] - 1).to(device),
        window_slots=None,
        window_tables=None,
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )


@contextmanager
def triton_in_place_of_cpu(calls: Counter[str] | None = None, *, deterministic: bool = False) -> Generator[None]:
    """Run the (interpreted) Triton kernels for operations on CPU tensors: the whole engine without a GPU.

    With `deterministic`, those of a process whose results must not depend on the batch.

    `calls` then counts how often each ran in place of a CPU function, 0 for one that never did.
    """
    from sluice.kernels.copy_blocks.kernel import copy_blocks_triton
    from sluice.kernels.gated_activation.kernel import gated_activation_triton
    from sluice.kernels.linear.cuda import pack_gated_linear_cuda, pack_linear_cuda
    from sluice.kernels.logprobs.kernel import logprobs_triton
    from sluice.kernels.paged_attention.invariant import paged_attention_invariant
    from sluice.kernels.paged_attention.kernel import allocate_cuda, paged_attention_triton
    from sluice.kernels.penalties.kernel import apply_penalties_triton
    from sluice.kernels.prepare_batch.kernel import prepare_batch_triton
    from sluice.kernels.rms_norm.kernel import rms_norm_triton
    from sluice.kernels.sample.kernel import sample_triton
    from sluice.kernels.soft_cap.kernel import soft_cap_triton
    from sluice.kernels.token_masks.kernel import apply_token_masks_triton
    from sluice.kernels.write_kv.kernel import write_kv_triton

    def allocate(*sizes: int, dtype: torch.dtype) -> object:
        num_blocks, block_size, num_kv_heads, head_size = sizes
        return allocate_cuda(num_blocks, block_size, num_kv_heads, head_size, dtype=dtype, device=torch.device("cpu"))

    def copy_blocks(runs: BlockRuns, pairs: Sequence[tuple[int, int]]) -> None:
        copy_blocks_triton(runs, on_device(pairs, torch.device("cpu")))

    launchers: Mapping[str, Mapping[str, Callable[..., object]]] = {
        "copy_blocks": {"copy_blocks_cpu": copy_blocks},
        "gated_activation": {"gated_activation_cpu": gated_activation_triton},
        "linear": {"pack_linear_cpu": pack_linear_cuda, "pack_gated_linear_cpu": pack_gated_linear_cuda},
        "logprobs": {"logprobs_cpu": logprobs_triton},
        "paged_attention": {
            "allocate_cpu": allocate,
            "paged_attention_cpu": paged_attention_invariant if deterministic else paged_attention_triton,
        },
        "penalties": {"apply_penalties_cpu": apply_penalties_triton},
        "prepare_batch": {"prepare_batch_cpu": prepare_batch_triton},
        "rms_norm": {"rms_norm_cpu": rms_norm_triton},
        "soft_cap": {"soft_cap_cpu": soft_cap_triton},
        "sample": {"sample_cpu": sample_triton},
        "token_masks": {"apply_token_masks_cpu": apply_token_masks_triton},
        "write_kv": {"write_kv_cpu": write_kv_triton},
    }
    calls = Counter[str]() if calls is None else calls
    with ExitStack() as stack:
        for operation, functions in launchers.items():
            for name, launcher in functions.items():
                counted = _counted(name.removesuffix("_cpu"), launcher, calls)
                stack.enter_context(patch(f"sluice.kernels.{operation}.cpu.{name}", counted))
        stack.enter_context(_triton_experts())
        stack.enter_context(_forms_of_a_gpu())
        if deterministic:
            stack.enter_context(patch("sluice.kernels.linear.cuda.path_of", return_value=chain.Path.INVARIANT))
        # The CPU's shortcuts past `sample` and `prepare_batch`.
        stack.enter_context(patch("sluice.kernels.sample.cpu.draws_with_cpu", return_value=None))
        stack.enter_context(patch("sluice.engine.execution.layout._are_decodes", return_value=False))
        yield


@contextmanager
def _forms_of_a_gpu() -> Generator[None]:
    """Keep weights as for a GPU: its products round them themselves, and read packed ones in forms of their own."""
    with (
        patch("sluice.engine.models.load.WeightForm.is_on_gpu", True),
        patch("sluice.engine.models.load.has_float8", return_value=True),
    ):
        yield


@contextmanager
def _triton_experts() -> Generator[None]:
    """Run the kernels of mixtures. They are not counted: most models have no experts."""
    from sluice.kernels.experts.kernel import experts_triton, route_triton

    with (
        patch("sluice.kernels.experts.cpu.route_cpu", route_triton),
        patch("sluice.kernels.experts.cpu.experts_cpu", experts_triton),
    ):
        yield


def _counted(name: str, launcher: Callable[..., object], calls: Counter[str]) -> Callable[..., object]:
    # So that a kernel that is never called is listed.
    calls[name] += 0

    def call(*args: object, **options: object) -> object:
        calls[name] += 1
        return launcher(*args, **options)

    return call


def calls_line(calls: Counter[str]) -> Line:
    """Report how often each kernel ran; wrong if one never did, since it was not checked."""
    return Line("calls of interpreted kernels", dict(calls), min(calls.values(), default=0) > 0)


# Compared with transformers

SMALL: dict[str, object] = {
    "vocab_size": 211, "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    "initializer_range": 0.1,
}  # fmt: skip
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
_WINDOW = {"sliding_window": 5, "query_pre_attn_scalar": 40}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", _WINDOW | _CAPS),
    "olmo2": ("olmo2", {}),
    "cohere2": ("cohere2", {"sliding_window": 5, "sliding_window_pattern": 2, "logit_scale": 0.5}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "granite": ("granite", {"embedding_multiplier": 6.0, "residual_multiplier": 0.2, "attention_multiplier": 0.2}),
    "gemma3": ("gemma3_text", _WINDOW | {"sliding_window_pattern": 2, "rope_parameters": _ROPES}),
}
"""Name to transformers' model type and config settings beyond the sizes."""


def save_small_model(name: str, folder: Path) -> Any:  # noqa: ANN401 - transformers' models have many types
    """Write a small random model in float32 as a folder; return transformers' own."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    model_type, extra = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **(SMALL | extra))
    # transformers' SDPA ignores a soft cap.
    attention = {"attn_implementation": "eager"} if "attn_logit_softcapping" in extra else {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def load_folder(folder: Path, form: WeightForm) -> Decoder:
    """Return our decoder of a folder."""
    opened = open_model_folder(folder)
    config = parse_config(opened.config)
    return load_decoder(config, opened.weights, form=form, max_model_len=512, max_tokens=512)


def logits_of_prompts(
    decoder: Decoder, prompts: Sequence[Sequence[int]], *, chunk: int, cache_dtype: torch.dtype
) -> list[Tensor]:
    """Return logits `[tokens, V]` of each prompt, all computed together, `chunk` tokens of each per step."""
    block_size, device = 16, decoder.weights.device
    longest = max(map(len, prompts))
    blocks_each = -(-longest // block_size)
    caches = make_caches(
        decoder.config, num_blocks=blocks_each * len(prompts), block_size=block_size, dtype=cache_dtype, device=device
    )
    slots = Slots(num_slots=len(prompts), max_blocks_per_seq=blocks_each)
    layout = BatchLayout(
        slots,
        max_num_seqs=len(prompts),
        num_blocks=blocks_each * len(prompts),
        block_size=block_size,
        device=device,
    )
    blocks = torch.randperm(blocks_each * len(prompts)).view(len(prompts), -1).tolist()
    sequences = [_sequence(i, prompt, blocks[i]) for i, prompt in enumerate(prompts)]
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, longest, chunk):
        batch = batch_of((s, start, min(chunk, s.num_tokens - start), True) for s in sequences if start < s.num_tokens)
        slots.write(batch)
        tensors = layout.lay_out(batch)
        every_row = torch.arange(tensors.input_ids.shape[0], device=device)
        rows = decoder.forward(tensors._replace(logit_rows=every_row), caches)
        for row, logits in zip(batch.rows, rows.split([row.num_tokens for row in batch.rows]), strict=True):
            parts[row.sequence_id].append(logits)
    return [torch.cat(chunks) for chunks in parts]


def _sequence(index: int, prompt: Sequence[int], blocks: Sequence[int]) -> EngineSequence:
    return EngineSequence(
        id=index,
        request_id=str(index),
        choice=0,
        sampling=Sampling(temperature=0),
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        tables=[list(blocks)],
    )


def tokens_of(engine: LLMEngine, requests: Sequence[Request]) -> dict[tuple[str, int], list[int]]:
    """Run requests to their ends; return the tokens of each choice, by request and choice."""
    engine.add(requests)
    tokens = {(request.id, choice): list[int]() for request in requests for choice in range(request.num_choices)}
    while not engine.is_idle:
        for delta in engine.advance():
            tokens[delta.request_id, delta.choice] += delta.token_ids
        engine.check_invariants()
    return tokens


def generate_greedily(
    folder: Path, device: torch.device, prompts: Sequence[Sequence[int]], *, max_tokens: int
) -> tuple[list[list[int]], int]:
    """Run an engine in float32 with small chunks and so few blocks that it must preempt; return tokens, preemptions."""
    block_size = 4
    longest = max(map(len, prompts)) + max_tokens
    options = ModelOptions(
        path=folder,
        device=str(device),
        dtype="float32",
        block_size=block_size,
        num_blocks=-(-longest // block_size) + 1,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=longest,
    )
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64)
    engine = LLMEngine(load_model_runner(options), NullTokenizer(), config)
    sampling = Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    requests = [Request(id=str(i), prompt_token_ids=tuple(one), sampling=sampling) for i, one in enumerate(prompts)]
    return list(tokens_of(engine, requests).values()), engine.stats.num_preemptions
