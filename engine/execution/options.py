"""What to load, onto which device, within which limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sluice.engine.config import CPU_CACHE_BYTES, CPU_MEMORY_FRACTION, Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model, its device and its memory limits."""

    path: Path
    """A folder with config.json and safetensors."""

    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end an output besides those of the folder's configs: the tokenizer's, the chat template's."""

    device: str = "cpu"
    """"cpu", or "cuda:0"."""

    dtype: str = "auto"
    """float32, float16, bfloat16, or auto: as the weights are stored (on the CPU, bfloat16 for float16)."""

    quantization: Quantization = "auto"
    """int8: round weights to int8 while loading. On the CPU for bfloat16, where activations are rounded for each
    product too; on a GPU for bfloat16 and float16. int4: the same in 4 bits (the output in 8), on the CPU. auto:
    packed weights stay so on the CPU in bfloat16, and on a GPU in 16 bits.
    """

    kv_cache_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """Keys and values in 8 bits, with one scale per head and token: fp8 on a GPU, int8 on the CPU for bfloat16. auto:
    the model's dtype.
    """

    block_size: int = 16
    """Token slots in a block of the KV cache."""

    num_blocks: int | None = None
    """Blocks of the KV cache, each of all layers. None: as many as the memory allows."""

    groups_layers: bool = True
    """Whether layers with a sliding window may have block tables of their own. Without, a sequence has one table."""

    kv_cache_bytes: int | None = None
    """Memory for the KV cache. None: the rest of `memory_fraction`."""

    host_cache_bytes: int = 0
    """Host memory for blocks that leave the device's cache and may be needed again. 0: none."""

    memory_fraction: float = CPU_MEMORY_FRACTION
    """Share of the memory free after loading the weights, for the KV cache and the largest step together."""

    cpu_cache_bytes: int | None = CPU_CACHE_BYTES
    """On a CPU, the most of that share that the cache takes, unless `max_num_seqs` sequences of `max_model_len` fill
    more. None: the whole share.
    """

    measures_steps: bool | None = None
    """Whether the largest step is run to measure its memory. None: on a GPU. On the CPU it would take up to minutes,
    and the share left free is larger.
    """

    max_model_len: int | None = None
    """Maximum tokens of a sequence. None: the model's own context."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    speculates: bool = False
    """Whether steps have drafts, each with a row of logits: the memory of the largest step has them then."""

    graphs: bool | None = None
    """Whether steps are recorded and replayed. None: on a GPU. On the CPU a replay recomputes, for tests."""

    kernels: Literal["auto", "triton", "torch"] = "auto"
    """On a GPU: auto uses Triton's, and torch's operators for one that does not work; triton refuses to load then;
    torch uses no Triton.
    """

    is_deterministic: bool = False
    """Whether a row's result must be bitwise the same in any batch. On a GPU that takes other kernels; on the CPU it is
    so with the native kernels, which it requires.
    """

    warms_up: bool = False
    """Whether a load on a GPU tries each kernel, and runs every variant, so that nothing is compiled for a job."""

    adapters: Path | None = None
    """Folder whose folders are adapters. None: there are none."""

    max_loaded_adapters: int = 8
    """Adapters that are loaded at once."""

    num_threads: int | None = None
    """Threads on the CPU. None: one per core that affinity and cgroups allow, or as OMP_NUM_THREADS says."""

    lag: Literal[0, 1] | None = None
    """Steps that may be launched ahead of their results (`Executor.lag`). None: 1 on a GPU, 0 on a CPU."""
