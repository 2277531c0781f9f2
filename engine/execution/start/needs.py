"""What a model takes and how fast it can be at most, before its weights are read: counted from its config and headers.

Buffers of steps, norms and rotary angles are not counted.
"""

import time
from dataclasses import dataclass

import torch

from sluice.engine.execution.memory import free_memory_bytes
from sluice.engine.execution.start.model_loading import LoadPlan
from sluice.engine.models.config import DecoderConfig
from sluice.engine.models.weights import HEAD

_INT4_BITS, _INT8_BITS = 5.0, 8.5
"""Of an element with its share of scales, as `--quantization int4` keeps layers and the output."""

_PROBE_BYTES = 256 * 2**20
_REPEATS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """What a model takes on its device."""

    num_parameters: int
    weight_bytes: int
    """Of all matrices, as they are kept."""

    read_bytes: int
    """Of the matrices that one token of one sequence multiplies: of a mixture, only those of its experts."""

    sequence_bytes: int
    """Keys and values of one sequence of `max_model_len` tokens."""

    max_model_len: int
    free_bytes: int
    """Of the device's memory, that weights and KV cache may take."""

    @property
    def fits(self) -> bool:
        """Whether weights and one sequence fit the free memory."""
        return self.weight_bytes + self.sequence_bytes <= self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Elements:
    """Elements of a model's matrices."""

    embedding: int
    output: int
    """0 if it is the embedding, too."""

    layers: int
    read_layers: int
    """Those of layers that one token multiplies."""

    @property
    def all(self) -> int:
        return self.embedding + self.output + self.layers

    @property
    def ends(self) -> int:
        """Those that the output's product multiplies."""
        return self.output or self.embedding


def needs_of(plan: LoadPlan) -> ModelNeeds:
    """Return what a model takes on its device, and what is free there."""
    limits, options = plan.limits, plan.options
    elements = _elements_of(plan.config, has_classes=plan.folder.weights.num_rows(HEAD) > 0)
    products, table = _product_bytes(plan, elements), _table_bytes(plan, elements)
    blocks = limits.blocks_of(limits.max_model_len, options.max_num_batched_tokens)
    return ModelNeeds(
        num_parameters=elements.all,
        weight_bytes=products + table,
        # The experts that are not chosen are not read, nor more than a row of the table.
        read_bytes=products * (elements.read_layers + elements.ends) // (elements.layers + elements.ends),
        sequence_bytes=blocks * limits.block_bytes,
        max_model_len=limits.max_model_len,
        free_bytes=free_memory_bytes(torch.device(options.device)),
    )


def bandwidth_bytes_per_s(device: torch.device) -> float:
    """Measure how many bytes of its memory a device reads in a second: the best of a few sums of 256 MiB."""
    probe = torch.ones(_PROBE_BYTES // 8, dtype=torch.int64, device=device)
    times: list[float] = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        # Reading the result waits for the device.
        int(probe.sum())
        times.append(time.perf_counter() - start)
    return _PROBE_BYTES / min(times)


def _product_bytes(plan: LoadPlan, elements: _Elements) -> int:
    """Return the bytes of the matrices of products, in the form that they are kept in."""
    form, weights = plan.form, plan.folder.weights
    if form.quantization == "int4":
        return int((elements.layers * _INT4_BITS + elements.ends * _INT8_BITS) / 8)
    if form.quantization == "int8":
        return elements.layers + elements.ends
    packed = weights.packed_elements if form.keeps_packed else 0
    all_bytes = (weights.packed_bytes if packed else 0) + (elements.all - packed) * plan.dtype.itemsize
    if not elements.output:
        return all_bytes
    return all_bytes - (_packed_table_bytes(plan, elements) or elements.embedding * plan.dtype.itemsize)


def _table_bytes(plan: LoadPlan, elements: _Elements) -> int:
    """Return the bytes of an embedding that is no product's weight."""
    form, packed_bytes = plan.form, _packed_table_bytes(plan, elements)
    is_apart = form.quantization in ("int8", "int4") or (packed_bytes and not form.keeps_table_packed)
    if not elements.output and not is_apart:
        return 0
    return packed_bytes if packed_bytes and form.keeps_table_packed else elements.embedding * plan.dtype.itemsize


def _packed_table_bytes(plan: LoadPlan, elements: _Elements) -> int:
    """Return what the embedding takes packed; 0 if it is plain: if all matrices are packed, so is the embedding."""
    weights = plan.folder.weights
    if not plan.form.keeps_packed or weights.packed_elements < elements.all:
        return 0
    return weights.packed_bytes * elements.embedding // elements.all


def _elements_of(config: DecoderConfig, *, has_classes: bool) -> _Elements:
    ends, query = config.vocab_size * config.hidden_size, config.num_heads * config.head_size
    key_value = config.num_kv_heads * config.head_size
    attention = config.hidden_size * (2 * query + 2 * key_value)
    dense = 3 * config.hidden_size * config.intermediate_size
    layers = read = 0
    for layer in range(config.num_layers):
        all_experts = chosen = dense
        if config.mixture is not None and config.mixture.layers[layer]:
            mixture = config.mixture
            one, shared = (3 * config.hidden_size * size for size in (mixture.intermediate_size, mixture.shared_size))
            all_experts, chosen = mixture.num_experts * one + shared, mixture.num_chosen * one + shared
        layers, read = layers + attention + all_experts, read + attention + chosen
    return _Elements(
        embedding=ends, output=0 if config.is_tied or has_classes else ends, layers=layers, read_layers=read
    )
