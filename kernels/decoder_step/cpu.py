"""The decoder step on the CPU by native.c.

Its C structures are filled once; a step passes only the batch's pointers.
"""

import ctypes
from operator import is_not

import torch
from torch import Tensor

from sluice.kernels.adapters.native import NativeRows
from sluice.kernels.adapters.products import AdaptedProducts
from sluice.kernels.checks import check, check_rows
from sluice.kernels.decoder_shape import DecoderShape
from sluice.kernels.decoder_step import DecoderWeights, LayerWeights, StepAdapters, StepInputs
from sluice.kernels.experts import Dense, Mixture, SeparateExperts
from sluice.kernels.gated_activation.cpu import ACTIVATION_CODES
from sluice.kernels.linear import Linear
from sluice.kernels.linear.native import NativeLinear, WeightStruct, whole_rows
from sluice.kernels.native import native_function
from sluice.kernels.paged_attention import KVCache
from sluice.kernels.paged_attention.cpu import MAX_HEAD_SIZE
from sluice.kernels.paged_attention.layout import Layout, padded
from sluice.kernels.tiles import may_use_tiles

SIGNATURE = ("sluice_decoder_step", "ppi")
SIZES = ("sluice_decoder_step_sizes", "p")
_LINE = 32
"""Padding between rows, one cache line in elements: rows a power of two apart would share few cache sets."""

_STEP_BYTES = 64
_NUM_TENSORS = StepInputs._fields.index("max_query_len")
"""Fields of `StepInputs` that are tensors, which come first."""

_PHASES = (
    "start",
    "embed",
    "norm",
    "qkv",
    "write_kv",
    "attention",
    "keep",
    "attention_output",
    "prepare",
    "route",
    "gather",
    "gated",
    "down",
    "combine",
    "output",
)
"""Phases of a step in native.c, in its order."""


_OF_EXPERTS = ("scores", "shares", "chosen", "places", "counts", "blocks", "num_blocks", "rows", "inner", "shared")
"""Buffers of layers with experts."""

_BLOCK_ROWS = 32
"""The least that `rows_of_block` of linear/native.c answers."""


class _Router(ctypes.Structure):
    """`Router` of parts.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("E", "M", "num_chosen", "is_normalised", "has_shared")),
    )


class _Mixture(ctypes.Structure):
    """`Mixture` of native.c."""

    _fields_ = (("router", _Router), *((name, ctypes.c_void_p) for name in ("gate_up", "down")))


class _Layer(ctypes.Structure):
    """`Layer` of native.c."""

    _fields_ = (
        *((name, WeightStruct) for name in ("qkv", "attention_output", "gate_up", "down")),
        ("mixture", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm", "query_row_norm", "key_row_norm")),
        *((name, ctypes.c_void_p) for name in ("cos_sin", "sinks", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("window", "table", "R")),
        *((name, ctypes.c_float) for name in ("head_eps", "head_offset")),
        *((name, ctypes.c_void_p) for name in ("key_scales", "value_scales")),
    )


class _Model(ctypes.Structure):
    """`Model` of native.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "embedding", "final_norm")),
        ("packed_embedding", WeightStruct),
        ("output", WeightStruct),
        *(
            (name, ctypes.c_void_p)
            for name in ("residual", "normed", "qkv", "query", "attended", "gated", "bytes", "scales", "shrunk")
        ),
        *((name, ctypes.c_void_p) for name in _OF_EXPERTS),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("hidden_stride", "qkv_stride", "heads_stride", "gated_stride", "bytes_stride"),
                *("shrunk_stride", "inner_stride"),
            )
        ),
        *((name, ctypes.c_int64) for name in ("L", "M", "H", "G", "D", "block_size", "P", "DP")),
        *((name, ctypes.c_int64) for name in ("activation", "use_tiles", "is_norm_centered", "is_parallel")),
        *(
            (name, ctypes.c_float)
            for name in ("norm_eps", "norm_offset", "scale", "soft_cap", "embedding_scale", "logit_scale", "final_cap")
        ),
    )


class _Step(ctypes.Structure):
    """`Step` of native.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_ids", "positions", "slot_mapping")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "query_start_locs", "context_lens")),
        *((name, ctypes.c_void_p) for name in ("window_slots", "window_tables", "rows")),
        *((name, ctypes.c_void_p) for name in ("adapters", "kept_adapters", "logits", "seconds")),
        *((name, ctypes.c_int64) for name in ("T", "S", "num_rows", "table_stride", "logits_stride")),
        *((name, ctypes.c_int64) for name in ("window_slots_stride", "window_stride", "window_table_stride")),
    )


_SIZES = (*map(ctypes.sizeof, (_Layer, _Model, _Step, _Mixture)), len(_PHASES))


class DecoderStep:
    """A model ready for its steps, with room for `max_tokens` tokens."""

    def __init__(self, model: DecoderWeights, max_tokens: int) -> None:
        native = native_function(*SIGNATURE)
        assert native is not None, "native products exist only with the native library"
        assert _native_sizes() == _SIZES, "the structures here differ from those of native.c"
        self._native = native
        mixtures = [
            _MixtureWeights(layer.feed_forward) if isinstance(layer.feed_forward, Mixture) else None
            for layer in model.layers
        ]
        self._kept = model, mixtures
        self._caches: list[KVCache] | None = None
        self._num_tables = 1
        self._output = _native(model.output)
        self._logits = torch.empty(0, self._output.out_size, dtype=torch.bfloat16)
        self._layers = (_Layer * len(model.layers))(*map(_layer, model.layers, mixtures))
        self._max_tokens = max_tokens
        self._room = _Room(model, max_tokens)
        self._model = _model(model, self._layers, self._output, self._room)
        self._inputs: tuple[object, ...] | None = None
        """The last step's tensors; `_step` and `_rows` are made from them."""

        self._step, self._rows = _Step(), self._logits
        self._adapters: AdaptedProducts | None = None
        self._adapted_rows: tuple[NativeRows, ...] = ()
        """Pointed to by `_step`."""

    def use_adapters(self, adapters: AdaptedProducts) -> None:
        """Take the adapters that steps name."""
        self._adapters = adapters

    def run(self, inputs: StepInputs, caches: list[KVCache], *, seconds: Tensor | None = None) -> Tensor:
        """Compute every token, writing keys and values to packed `caches`, one per layer.

        Args:
            inputs: the batch. A tensor of the previous step may have new contents, but must not have been resized or
                moved: it is not checked again.
            caches: one per layer. The list of the previous step must hold the same caches.
            seconds: `[len(_PHASES) + 1]` float64, for measurements: the duration of each phase is added to it; the
                first phase includes the time since the timestamp in the last element.

        Returns:
            Logits `[R, V]` bfloat16 of `logit_rows`, valid until the next call.

        Raises:
            ValueError: there are more tokens than room, or a tensor has the wrong shape, dtype or strides.
        """
        if caches is not self._caches:
            self._use(caches)
        # Most steps reuse the memory of the previous one. Each tensor access is costly while the caches hold weights.
        if self._inputs is None or any(map(is_not, inputs[:_NUM_TENSORS], self._inputs)):
            self._take(inputs)
        self._take_adapters(inputs.adapters)
        self._step.seconds = None if seconds is None else seconds.data_ptr()
        self._native(ctypes.addressof(self._model), ctypes.addressof(self._step), torch.get_num_threads())
        return self._rows

    def _take(self, inputs: StepInputs) -> None:
        """Check `inputs`, and fill the native structure from them.

        Raises:
            ValueError: as `run`.
        """
        _check(inputs, self._max_tokens)
        slots, tables = inputs.window_slots, inputs.window_tables
        num_windowed = 0 if slots is None else slots.shape[0]
        check(
            self._num_tables <= 1 + num_windowed, "caches are of {} tables, got {}", self._num_tables, 1 + num_windowed
        )
        num_rows = inputs.logit_rows.shape[0]
        if num_rows > self._logits.shape[0]:
            self._logits = torch.empty(num_rows, self._output.out_size, dtype=torch.bfloat16)
        self._step = _Step(
            inputs.input_ids.data_ptr(),
            inputs.positions.data_ptr(),
            inputs.slot_mapping.data_ptr(),
            inputs.block_tables.data_ptr(),
            inputs.query_start_locs.data_ptr(),
            inputs.context_lens.data_ptr(),
            _pointer(slots),
            _pointer(tables),
            inputs.logit_rows.data_ptr(),
            None,
            None,
            self._logits.data_ptr(),
            None,
            inputs.input_ids.shape[0],
            inputs.context_lens.shape[0],
            num_rows,
            inputs.block_tables.stride(0),
            self._output.out_size,
            0 if slots is None else slots.stride(0),
            *((0, 0) if tables is None else tables.stride()[:2]),
        )
        self._inputs, self._rows = inputs[:_NUM_TENSORS], self._logits[:num_rows]

    def _take_adapters(self, adapters: StepAdapters | None) -> None:
        """Point to the adapters of the step's rows, or to none."""
        step, model = self._step, self._model
        if adapters is None:
            step.adapters = step.kept_adapters = None
            return
        assert self._adapters is not None, "a step with adapters is of a model with adapters"
        of_tokens, of_kept = (self._adapters.native_rows(rows) for rows in adapters)
        self._adapted_rows = of_tokens, of_kept
        step.adapters, step.kept_adapters = of_tokens.address, of_kept.address
        model.shrunk, model.shrunk_stride = of_tokens.shrunk.data_ptr(), of_tokens.shrunk.stride(0)

    def run_hidden(self, inputs: StepInputs, caches: list[KVCache]) -> Tensor:
        """Compute a step as `run` does, without the product with the output's weight.

        Returns:
            The normed rows `[R, M]` bfloat16 of `logit_rows`, valid until the next call; strided.

        Raises:
            ValueError: as `run`.
        """
        if caches is not self._caches:
            self._use(caches)
        self._take(inputs)
        self._take_adapters(inputs.adapters)
        self._step.logits = None
        # The next step fills the structure again, with its logits.
        self._inputs = None
        self._native(ctypes.addressof(self._model), ctypes.addressof(self._step), torch.get_num_threads())
        return self._room.normed[: inputs.logit_rows.shape[0], : self._model.M]

    def time_phases(self, inputs: StepInputs, caches: list[KVCache]) -> dict[str, float]:
        """Return seconds of each phase of a step, which is computed as by `run`."""
        seconds = torch.zeros(len(_PHASES) + 1, dtype=torch.float64)
        self.run(inputs, caches, seconds=seconds)
        return dict(zip(_PHASES[1:], seconds.tolist()[1:], strict=False))

    def _use(self, caches: list[KVCache]) -> None:
        for layer, cache in zip(self._layers, caches, strict=True):
            assert cache.layout is Layout.PACKED, "a cache with native products is packed"
            layer.keys, layer.values = cache.keys.data_ptr(), cache.values.data_ptr()
            layer.key_scales, layer.value_scales = _pointer(cache.key_scales), _pointer(cache.value_scales)
            layer.table = cache.table
        self._model.block_size, self._model.P = caches[0].block_size, padded(caches[0].block_size)
        self._caches, self._inputs = caches, None
        self._num_tables = 1 + max(cache.table for cache in caches)


class _Room:
    """Buffers between the operations of a step: T rows each, with padding between rows."""

    def __init__(self, model: DecoderWeights, max_tokens: int) -> None:
        def rows(width: int) -> Tensor:
            return torch.empty(max_tokens, width + _LINE, dtype=torch.bfloat16)

        shape = model.shape
        heads = shape.num_heads * shape.head_size
        self.residual, self.normed = rows(shape.hidden_size), rows(shape.hidden_size)
        self.qkv = rows(heads + 2 * shape.num_kv_heads * shape.head_size)
        self.query, self.attended = rows(heads), rows(heads)
        shared = 0 if shape.mixture is None else shape.mixture.shared_size
        self.gated = rows(max(shape.intermediate_size, shared))
        self.of_experts = _RoomOfExperts(shape, max_tokens)
        row_bytes = max(_native(product).row_bytes for product in model.products)
        num_rows = whole_rows(max(max_tokens, self.of_experts.rows.shape[0]))
        self.bytes = torch.empty(num_rows, row_bytes + _STEP_BYTES, dtype=torch.int8)
        self.scales = torch.empty(num_rows, dtype=torch.float32)


class _RoomOfExperts:
    """Buffers of layers with experts; empty if there are none."""

    def __init__(self, shape: DecoderShape, max_tokens: int) -> None:
        mixture = shape.mixture
        tokens, experts, chosen = (
            (0, 0, 0) if mixture is None else (max_tokens, mixture.num_experts, mixture.num_chosen)
        )
        pairs = tokens * chosen
        # Rows of each expert begin at a multiple of eight.
        num_rows = pairs + 7 * min(experts, pairs)

        def ints(*size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32)

        def rows(count: int, width: int) -> Tensor:
            return torch.empty(count, width + _LINE, dtype=torch.bfloat16)

        self.scores = torch.empty(tokens, experts + 1, dtype=torch.float32)
        self.shares = torch.empty(tokens, chosen + 1, dtype=torch.float32)
        self.chosen, self.places, self.counts = ints(tokens, chosen), ints(tokens, chosen), ints(experts)
        self.blocks = ints(min(experts, pairs) + pairs // _BLOCK_ROWS, 3)
        self.num_blocks = torch.zeros(1, dtype=torch.int64)
        self.rows = rows(num_rows, shape.hidden_size)
        self.inner = rows(num_rows, 0 if mixture is None else mixture.intermediate_size)
        self.shared = rows(tokens if mixture is not None and mixture.shared_size else 0, shape.hidden_size)


class _MixtureWeights:
    """The C structure of a mixture, and what it points to."""

    def __init__(self, mixture: Mixture) -> None:
        assert isinstance(mixture.experts, SeparateExperts), "check can_step first"
        each, router = mixture.experts.each, mixture.router
        self._gate_up = (WeightStruct * len(each))(*(_native(expert.gated).struct for expert in each))
        self._down = (WeightStruct * len(each))(*(_native(expert.down).struct for expert in each))
        self.struct = _Mixture(
            _Router(
                router.weight.data_ptr(),
                _pointer(router.bias),
                router.num_experts,
                router.weight.shape[1],
                router.num_chosen,
                router.is_normalised,
                router.has_shared,
            ),
            ctypes.addressof(self._gate_up),
            ctypes.addressof(self._down),
        )


def can_step(model: DecoderWeights) -> bool:
    """Whether a decoder can run in one call: all products and its attention are native, and experts of one form."""
    if model.shape.head_size > MAX_HEAD_SIZE or not all(isinstance(one, NativeLinear) for one in model.products):
        return False
    mixtures = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, Mixture)]
    return all(isinstance(one.experts, SeparateExperts) and _are_alike(one.experts) for one in mixtures)


def _are_alike(experts: SeparateExperts) -> bool:
    """Whether a product of all experts can take their weights."""
    structs = [[_native(product).struct for product in expert.products] for expert in experts.each]
    return len({tuple((struct.kind, struct.span) for struct in each) for each in structs}) == 1


def _native_sizes() -> tuple[int, ...]:
    """Return the structure sizes that native.c was compiled with, as `_SIZES`."""
    native = native_function(*SIZES)
    assert native is not None, "the library with the step has this function"
    sizes = torch.zeros(len(_SIZES), dtype=torch.int64)
    native(sizes.data_ptr())
    return tuple(sizes.tolist())


def _check(inputs: StepInputs, max_tokens: int) -> None:
    """Raise ValueError unless the batch fits the room, and the tensors' shapes and dtypes agree.

    Their contents (slots, blocks, rows) are not checked: the layout guarantees them.
    """
    tokens, seqs, rows = (x.shape[0] for x in (inputs.input_ids, inputs.context_lens, inputs.logit_rows))
    check(rows <= tokens <= max_tokens, "{} tokens, {} rows of logits: there is room for {}", tokens, rows, max_tokens)
    _check_line("input_ids", inputs.input_ids, torch.int64, tokens)
    _check_line("positions", inputs.positions, torch.int64, tokens)
    _check_line("slot_mapping", inputs.slot_mapping, torch.int64, tokens)
    _check_line("query_start_locs", inputs.query_start_locs, torch.int32, seqs + 1)
    _check_line("context_lens", inputs.context_lens, torch.int32, seqs)
    _check_line("logit_rows", inputs.logit_rows, torch.int64, rows)
    tables = inputs.block_tables
    check(
        tables.dim() == 2 and tables.shape[0] == seqs, "block_tables must be [{}, blocks], got {}", seqs, tables.shape
    )
    check(tables.dtype == torch.int32, "block_tables must be int32, got {}", tables.dtype)
    check_rows("block_tables", tables)
    _check_windows(inputs, tokens)


def _check_windows(inputs: StepInputs, tokens: int) -> None:
    slots, windowed = inputs.window_slots, inputs.window_tables
    if slots is None or windowed is None:
        check(slots is windowed, "window_slots and window_tables come together")
        return
    check(slots.dtype == torch.int64 and windowed.dtype == torch.int32, "window groups need int64 slots, int32 tables")
    check(slots.shape == (windowed.shape[0], tokens), "window_slots must be [W, {}], got {}", tokens, slots.shape)
    check(windowed.shape[1:] == inputs.block_tables.shape, "window_tables must be [W, *block_tables.shape]")
    check_rows("window_slots", slots)
    check_rows("window_tables", windowed)


def _check_line(name: str, x: Tensor, dtype: torch.dtype, size: int) -> None:
    check(
        x.dtype == dtype and x.shape == (size,) and x.is_contiguous(),
        "{} must be [{}] {} and contiguous, got {} {}",
        name,
        size,
        dtype,
        x.shape,
        x.dtype,
    )


def _native(product: Linear) -> NativeLinear:
    assert isinstance(product, NativeLinear), "check can_step first"
    return product


def _layer(layer: LayerWeights, mixture: _MixtureWeights | None) -> _Layer:
    # A layer has at most one of the two.
    norm, row_norm = layer.head_norm, layer.row_norm
    either = norm or row_norm
    dense = layer.feed_forward if isinstance(layer.feed_forward, Dense) else layer.feed_forward.shared
    return _Layer(
        _native(layer.qkv).struct,
        _native(layer.attention_output).struct,
        WeightStruct() if dense is None else _native(dense.gated).struct,
        WeightStruct() if dense is None else _native(dense.down).struct,
        None if mixture is None else ctypes.addressof(mixture.struct),
        _pointer(layer.attention_norm),
        _pointer(layer.mlp_norm),
        _pointer(layer.attention_post_norm),
        _pointer(layer.mlp_post_norm),
        None if norm is None else norm.query_weight.data_ptr(),
        None if norm is None else norm.key_weight.data_ptr(),
        None if row_norm is None else row_norm.query_weight.data_ptr(),
        None if row_norm is None else row_norm.key_weight.data_ptr(),
        layer.cos_sin.data_ptr(),
        _pointer(layer.sinks),
        None,
        None,
        layer.sliding_window,
        0,
        layer.cos_sin.shape[1],
        0.0 if either is None else either.eps,
        0.0 if either is None else either.weight_offset,
    )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _model(model: DecoderWeights, layers: ctypes.Array[_Layer], output: NativeLinear, room: _Room) -> _Model:
    shape = model.shape
    return _Model(
        layers=ctypes.addressof(layers),
        embedding=model.embedding.data_ptr() if isinstance(model.embedding, Tensor) else None,
        packed_embedding=WeightStruct() if isinstance(model.embedding, Tensor) else model.embedding.struct,
        final_norm=model.final_norm.data_ptr(),
        output=output.struct,
        residual=room.residual.data_ptr(),
        normed=room.normed.data_ptr(),
        qkv=room.qkv.data_ptr(),
        query=room.query.data_ptr(),
        attended=room.attended.data_ptr(),
        gated=room.gated.data_ptr(),
        bytes=room.bytes.data_ptr(),
        scales=room.scales.data_ptr(),
        **{name: getattr(room.of_experts, name).data_ptr() for name in _OF_EXPERTS},
        hidden_stride=room.residual.stride(0),
        qkv_stride=room.qkv.stride(0),
        heads_stride=room.query.stride(0),
        gated_stride=room.gated.stride(0),
        bytes_stride=room.bytes.stride(0),
        inner_stride=room.of_experts.inner.stride(0),
        L=len(model.layers),
        M=shape.hidden_size,
        H=shape.num_heads,
        G=shape.num_kv_heads,
        D=shape.head_size,
        DP=padded(shape.head_size),
        activation=ACTIVATION_CODES[shape.activation],
        use_tiles=may_use_tiles(),
        is_norm_centered=shape.is_norm_centered,
        is_parallel=shape.is_parallel,
        norm_eps=shape.norm_eps,
        norm_offset=shape.norm_offset,
        scale=shape.attention_scale,
        soft_cap=shape.attention_soft_cap,
        embedding_scale=model.embedding_scale,
        logit_scale=shape.logit_scale,
        final_cap=shape.final_soft_cap,
    )
