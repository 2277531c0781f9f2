"""Load a folder's weights into a decoder: names as in transformers, products fused and packed."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.engine.config import Quantization
from sluice.engine.errors import QuantizationUnavailable
from sluice.engine.models.config import DecoderConfig
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.mixtures import by_expert
from sluice.engine.models.rope_table import rope_table
from sluice.engine.models.weight_copies import WeightCopier, copier_to
from sluice.engine.models.weights import HEAD, Weights
from sluice.kernels.decoder_shape import MixtureShape
from sluice.kernels.decoder_step import DecoderWeights, LayerWeights
from sluice.kernels.embedding import Embedding
from sluice.kernels.experts import Dense, Mixture, Router, SeparateExperts, Stacked, StackedExperts
from sluice.kernels.linear import Linear, pack_gated_linear, pack_linear
from sluice.kernels.linear.cpu import multiplies_bfloat16
from sluice.kernels.linear.float8 import Float8Weight
from sluice.kernels.linear.grouped import grouped
from sluice.kernels.linear.int8 import rounded_to_int8
from sluice.kernels.linear.native import NativeLinear
from sluice.kernels.linear.stored import CodedWeight, StoredWeight, stacked_coded
from sluice.kernels.pages import free_heap_pages
from sluice.kernels.write_kv import HeadNorm


def has_float8(device: torch.device) -> bool:
    """Return whether a GPU converts and multiplies FP8."""
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return is_there and torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass(frozen=True, slots=True)
class WeightForm:
    """Form in which weights are kept."""

    dtype: torch.dtype
    device: torch.device
    quantization: Quantization = "none"
    """Of the weights of products."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether products are a GPU's."""
        return self.device.type != "cpu"

    @property
    def keeps_packed(self) -> bool:
        """Whether weights in 4 and 8 bits stay packed: a GPU's products multiply them, and the CPU's native ones."""
        if self.is_on_gpu:
            is_multiplied = self.dtype in (torch.float16, torch.bfloat16)
        else:
            is_multiplied = self.dtype == torch.bfloat16 and multiplies_bfloat16()
        return self.quantization == "auto" and is_multiplied

    @property
    def multiplies_float8(self) -> bool:
        """Whether products with rows in FP8 are possible."""
        return self.is_on_gpu and self.keeps_packed and has_float8(self.device)

    @property
    def keeps_table_packed(self) -> bool:
        """Whether an embedding stays packed, too: a GPU reads it as a table."""
        return self.keeps_packed and not self.is_on_gpu

    def scheme(self, weights: Weights) -> str:
        """Return what becomes of a model's weights, for its fingerprint; empty if they are in the dtype."""
        if self.keeps_packed and weights.packed_bytes:
            return "groups"
        return self.quantization if self.quantization in ("int8", "int4") else ""

    def says(self, weights: Weights) -> str:
        """Return what becomes of quantized weights, for people; empty if there are none."""
        if not weights.packed_bytes and not weights.dequantized:
            return ""
        becomes = f"dequantized at load to {self.scheme(weights) or str(self.dtype).removeprefix('torch.')}"
        if not self.keeps_packed or not weights.packed_bytes:
            return f"{becomes}: {weights.dequantized}" if weights.dequantized else becomes
        packed = f"packed: {weights.packed_bytes / 2**20:.0f} MiB in 4 and 8 bits"
        return f"{packed}, {becomes}: {weights.dequantized}" if weights.dequantized else packed


def load_decoder(
    config: DecoderConfig,
    weights: Weights,
    *,
    form: WeightForm,
    max_model_len: int,
    max_tokens: int,
    copier: WeightCopier | None = None,
) -> Decoder:
    """Build a decoder for sequences up to `max_model_len` and steps up to `max_tokens` tokens.

    Args:
        config: of the same folder.
        weights: memory-mapped.
        form: how the weights are kept, and on which device.
        max_model_len: longest sequence.
        max_tokens: maximum tokens of a step.
        copier: copies the weights to the device; chosen by the device if not given.

    Raises:
        ModelFolderError: a tensor is missing, corrupt or of another shape.
        QuantizationUnavailable: weights cannot be kept in this form.
    """
    copier = copier or copier_to(form.device)
    reader = _Reader(by_expert(weights, config.mixture, config.rules.experts), form, copier)
    embedding, output = _load_ends(config, weights, reader)
    scale = config.embedding_scale
    model = DecoderWeights(
        shape=config,
        embedding=embedding,
        embedding_scale=float(torch.tensor(scale, dtype=form.dtype))
        if config.rules.is_embedding_scale_rounded
        else scale,
        layers=tuple(_load_layers(config, reader, _angles(config, max_model_len, form.device))),
        final_norm=reader.kept("model.norm.weight", config.hidden_size),
        output=output,
        head=_load_head(config, weights, reader),
    )
    if copier is not None:
        copier.finish()
    return Decoder(config, model, max_tokens)


def _angles(config: DecoderConfig, max_model_len: int, device: torch.device) -> list[Tensor]:
    """Return the rotary angles of each layer: of no elements for a layer that does not rotate."""
    ropes = [(window and config.local_rope) or config.rope for window in config.sliding_windows]
    tables = {id(rope): rope_table(rope, max_model_len).to(device) for rope in ropes}
    none = torch.empty(max_model_len, 0, device=device)
    return [tables[id(rope)] if rotates else none for rope, rotates in zip(ropes, config.rotated_layers, strict=True)]


class _Reader:
    """Tensors of a folder, in one form."""

    def __init__(self, weights: Weights, form: WeightForm, copier: WeightCopier | None) -> None:
        self._weights = weights
        self._form = form
        self._copier = copier

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._form.device

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._stack([name], [shape])

    def kept(self, name: str, *shape: int) -> Tensor:
        """Return a copy of a tensor: a view of the mapped file would keep all of it in memory."""
        tensor = self.tensor(name, *shape)
        return tensor.clone() if self._copier is None else tensor

    def kept_rows(self, rows: dict[str, int], width: int) -> Tensor:
        """Return a copy of several matrices, stacked: their names and numbers of rows are given."""
        tensor = self._stack(list(rows), [(count, width) for count in rows.values()])
        return tensor.clone() if self._copier is None and len(rows) == 1 else tensor

    def linear(self, prefix: str, names: dict[str, int], in_size: int, *, has_bias: bool) -> Linear:
        """Build one product of several matrices `[N_i, in_size]`, stacked."""
        return self.packed(*self.stacked(prefix, names, in_size, has_bias=has_bias))

    def packed(self, weight: StoredWeight, bias: Tensor | None = None) -> Linear:
        """Build the product of one matrix."""
        with _as_unavailable():
            return pack_linear(weight, bias, is_int8=self._form.quantization == "int8")

    def embedding(self, name: str, shape: tuple[int, int]) -> Embedding:
        """Build an embedding: packed if it is stored so."""
        stored = self._weights.packed(name, shape) if self._form.keeps_table_packed else None
        if stored is None or isinstance(stored, Float8Weight):
            return self.kept(name, *shape)
        return NativeLinear(stored, None)

    def output(self, name: str, shape: tuple[int, int]) -> Linear:
        """Build the product with the output's weight."""
        return self.packed(self._matrices([name], [shape], num_bits=8))

    def tied(self, name: str, shape: tuple[int, int]) -> tuple[Embedding, Linear]:
        """Build the embedding that is the output's weight, too: one and the same, if the product has its numbers."""
        product = self.output(name, shape)
        is_rounded = self._form.quantization in ("int8", "int4")
        if isinstance(product, NativeLinear) and not is_rounded:
            return product, product
        return self.kept(name, *shape), product

    def dense(self, prefix: str, names: tuple[dict[str, int], str], config: DecoderConfig, *, has_bias: bool) -> Dense:
        """Build a feed-forward: the names of its gate and up projection with their sizes, and that of its last one."""
        gate_up, down = names
        return Dense(
            self.gated_linear(prefix, gate_up, config, has_bias=has_bias),
            self.linear(prefix, {down: config.hidden_size}, sum(gate_up.values()) // 2, has_bias=has_bias),
        )

    def gated_linear(self, prefix: str, names: dict[str, int], config: DecoderConfig, *, has_bias: bool) -> Linear:
        """Build the fused product of a gate and the projection that it gates."""
        weight, bias = self.stacked(prefix, names, config.hidden_size, has_bias=has_bias)
        form = self._form
        with _as_unavailable():
            if form.keeps_packed and not form.is_on_gpu and not isinstance(weight, Tensor) and weight.shape[0] % 32:
                weight = weight.dequantized(form.dtype)
            return pack_gated_linear(weight, bias, activation=config.activation, is_int8=form.quantization == "int8")

    def of_experts(self, prefix: str, names: dict[str, int], in_size: int, shape: MixtureShape) -> Stacked:
        """Stack a matrix `[N, in_size]`, of several `[N_i, in_size]`, of each expert."""
        experts = [f"{prefix}.{expert}.{name}" for expert in range(shape.num_experts) for name in names]
        rows = [*names.values()] * shape.num_experts
        weight = self._stack([f"{name}.weight" for name in experts], [(count, in_size) for count in rows])
        bias = self._stack([f"{name}.bias" for name in experts], [(n,) for n in rows]) if shape.has_bias else None
        return Stacked.of(
            weight.view(shape.num_experts, -1, in_size),
            None if bias is None else bias.view(shape.num_experts, -1),
            is_int8=self._form.quantization == "int8",
        )

    def stacked(
        self, prefix: str, names: dict[str, int], in_size: int, *, has_bias: bool
    ) -> tuple[StoredWeight, Tensor | None]:
        """Return several matrices `[N_i, in_size]`, stacked, and their biases."""
        free_heap_pages()
        weight = self._matrices([f"{prefix}.{name}.weight" for name in names], [(n, in_size) for n in names.values()])
        if not has_bias:
            return weight, None
        return weight, self._stack([f"{prefix}.{name}.bias" for name in names], [(size,) for size in names.values()])

    def _matrices(self, names: list[str], shapes: list[tuple[int, int]], *, num_bits: int = 4) -> StoredWeight:
        """Stack matrices: packed if all are packed alike, as they are stored or rounded to `num_bits` at least."""
        parts: list[CodedWeight] = []
        for name, shape in zip(names, shapes, strict=True):
            part = self._packed_part(name, shape, num_bits)
            if part is None:
                return self._stack(names, shapes)
            parts.append(part)
        together = stacked_coded(parts)
        return self._stack(names, shapes) if together is None else together.map(lambda part: part.to(self.device))

    def _packed_part(self, name: str, shape: tuple[int, int], num_bits: int) -> CodedWeight | None:
        """Return a matrix packed; None if it is multiplied as it is, or by a product that rounds it on its device."""
        form = self._form
        if form.keeps_packed:
            return self._weights.packed(name, shape)
        if form.is_on_gpu or form.quantization not in ("int8", "int4"):
            return None
        # Each by itself, so that only one is in the file's dtype at a time.
        plain = self.tensor(name, *shape)
        with _as_unavailable():
            return rounded_to_int8(plain) if form.quantization == "int8" else grouped(plain, num_bits=num_bits)

    def _stack(self, names: list[str], shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Stack tensors, each copied to its place; on the CPU a single one is not copied."""
        form = self._form
        if self._copier is None and len(names) == 1:
            return self._weights.get(names[0], shapes[0], form.dtype).to(form.device, form.dtype)
        rows = [shape[0] for shape in shapes]
        out = torch.empty((sum(rows), *shapes[0][1:]), dtype=form.dtype, device=form.device)
        for name, shape, place in zip(names, shapes, out.split(rows), strict=True):
            tensor = self._weights.get(name, shape, form.dtype)
            if self._copier is None:
                place.copy_(tensor)
            else:
                self._copier.copy(tensor, place)
        return out


@contextmanager
def _as_unavailable() -> Generator[None]:
    try:
        yield
    except ValueError as error:
        raise QuantizationUnavailable(f"{error}.") from error


def _load_layers(config: DecoderConfig, reader: _Reader, angles: Sequence[Tensor]) -> Iterator[LayerWeights]:
    for index, of_layer in enumerate(angles):
        yield _load_layer(config, reader, index, angles=of_layer)
        free_heap_pages()


def _load_layer(config: DecoderConfig, reader: _Reader, index: int, *, angles: Tensor) -> LayerWeights:
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    query, attention = config.num_heads * config.head_size, f"{prefix}.self_attn"

    def norm(name: str | None) -> Tensor | None:
        return None if name is None else reader.kept(f"{prefix}.{name}.weight", hidden)

    return LayerWeights(
        attention_norm=norm(config.rules.norms.attention),
        cos_sin=angles,
        qkv=_load_qkv(config, reader, attention),
        head_norm=_load_head_norm(config, reader, attention, together=False) if config.has_head_norm else None,
        row_norm=_load_head_norm(config, reader, attention, together=True) if config.has_row_norm else None,
        attention_output=reader.linear(attention, {"o_proj": hidden}, query, has_bias=config.has_output_bias),
        attention_post_norm=norm(config.rules.norms.attention_post),
        mlp_norm=norm(config.rules.norms.mlp),
        feed_forward=_load_feed_forward(config, reader, index, prefix),
        mlp_post_norm=norm(config.rules.norms.mlp_post),
        sliding_window=config.sliding_windows[index],
        sinks=reader.kept(f"{attention}.sinks", config.num_heads).float() if config.has_sinks else None,
    )


def _load_feed_forward(config: DecoderConfig, reader: _Reader, index: int, prefix: str) -> Dense | Mixture:
    if config.mixture is not None and config.mixture.layers[index]:
        return _load_mixture(config, config.mixture, reader, prefix)
    return reader.dense(f"{prefix}.mlp", _names_of_dense(config), config, has_bias=config.has_mlp_bias)


def _names_of_dense(config: DecoderConfig) -> tuple[dict[str, int], str]:
    size = config.intermediate_size
    names = ("gate_up_proj",) if config.rules.is_gate_up_fused else ("gate_proj", "up_proj")
    return dict.fromkeys(names, 2 * size // len(names)), "down_proj"


def _load_mixture(config: DecoderConfig, shape: MixtureShape, reader: _Reader, prefix: str) -> Mixture:
    """Load the router and the experts of a layer."""
    rules = config.rules.experts
    assert rules is not None, "the family says what the sizes are"
    block = f"{prefix}.{rules.block}"

    def dense(name: str, size: int) -> Dense:
        gate_up = dict.fromkeys(rules.gate_up, 2 * size // len(rules.gate_up))
        return reader.dense(f"{block}.{name}", (gate_up, rules.down), config, has_bias=shape.has_bias)

    return Mixture(
        router=_load_router(config, shape, reader, block),
        experts=SeparateExperts([dense(f"experts.{e}", shape.intermediate_size) for e in range(shape.num_experts)])
        if reader.device.type == "cpu"
        else _load_stacked(config, shape, reader, f"{block}.experts"),
        shared=dense(rules.shared, shape.shared_size) if shape.shared_size else None,
    )


def _load_stacked(config: DecoderConfig, shape: MixtureShape, reader: _Reader, prefix: str) -> StackedExperts:
    """Load the experts of a layer into two tensors."""
    rules, size, hidden = config.rules.experts, shape.intermediate_size, config.hidden_size
    assert rules is not None, "the family says what the sizes are"
    gate_up = dict.fromkeys(rules.gate_up, 2 * size // len(rules.gate_up))
    return StackedExperts(
        gate_up=reader.of_experts(prefix, gate_up, hidden, shape),
        down=reader.of_experts(prefix, {rules.down: hidden}, size, shape),
        activation=config.activation,
    )


def _load_router(config: DecoderConfig, shape: MixtureShape, reader: _Reader, block: str) -> Router:
    rules = config.rules.experts
    assert rules is not None, "the family says what the sizes are"
    rows = {f"{block}.{rules.router}.weight": shape.num_experts}
    if shape.shared_size:
        rows[f"{block}.{rules.shared}_gate.weight"] = 1
    return Router(
        weight=reader.kept_rows(rows, config.hidden_size),
        bias=reader.kept(f"{block}.{rules.router}.bias", shape.num_experts).float() if shape.has_bias else None,
        num_chosen=shape.num_chosen,
        is_normalised=shape.is_normalised,
        has_shared=shape.shared_size > 0,
    )


def _load_qkv(config: DecoderConfig, reader: _Reader, prefix: str) -> Linear:
    query, key_value = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    apart = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    names = {"qkv_proj": query + 2 * key_value} if config.rules.is_qkv_fused else apart
    weight, bias = reader.stacked(prefix, names, config.hidden_size, has_bias=config.has_qkv_bias)
    if config.rules.has_adjacent_pairs:
        order = half_order(config).to(reader.device)
        weight = weight[order] if isinstance(weight, Tensor) else weight.map(lambda part: part[order])
        bias = None if bias is None else bias[order]
    return reader.packed(weight, bias)


def half_order(config: DecoderConfig) -> Tensor:
    """Return the rows of the projection in the order in which a rotated pair is elements i and i + R / 2.

    Attention scores are the same, since queries and keys change their order alike.
    """
    size, rotated = config.head_size, config.rope.rotary_size
    head = torch.cat([torch.arange(0, rotated, 2), torch.arange(1, rotated, 2), torch.arange(rotated, size)])
    heads = torch.arange(config.num_heads + config.num_kv_heads)
    values = torch.arange(config.num_kv_heads * size) + len(heads) * size
    return torch.cat([(heads[:, None] * size + head).flatten(), values])


def _load_head_norm(config: DecoderConfig, reader: _Reader, prefix: str, *, together: bool) -> HeadNorm:
    """Load the norm of each query and key head, or of all of them together."""
    return HeadNorm(
        reader.kept(f"{prefix}.q_norm.weight", config.head_size * (config.num_heads if together else 1)),
        reader.kept(f"{prefix}.k_norm.weight", config.head_size * (config.num_kv_heads if together else 1)),
        config.head_norm_eps,
        config.norm_offset,
    )


def _load_ends(config: DecoderConfig, weights: Weights, reader: _Reader) -> tuple[Embedding, Linear]:
    """Load the embedding and the output: first, since the file's pages of the largest matrices add to the peak."""
    name, shape = "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    # A model without an output head generates nothing; steps that draw compute all the same.
    ends = (
        reader.tied(name, shape)
        if config.is_tied or not generates(config, weights)
        else (reader.embedding(name, shape), reader.output("lm_head.weight", shape))
    )
    free_heap_pages()
    return ends


def generates(config: DecoderConfig, weights: Weights) -> bool:
    """Return whether a model has an output head, and none that classifies in its place."""
    return not weights.num_rows(HEAD) and (config.is_tied or weights.num_rows("lm_head.weight") > 0)


def _load_head(config: DecoderConfig, weights: Weights, reader: _Reader) -> Tensor | None:
    num_classes = weights.num_rows(HEAD)
    return reader.kept(HEAD, num_classes, config.hidden_size).float() if num_classes else None
