"""Compute steps with a model on a device: lay out, forward, sample. Knows no scheduler."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sluice.engine.batch import MAX_DRAFTS, NO_DRAFTS, Batch, Drafts, ScheduledRow
from sluice.engine.errors import ModelFolderError, NotEnoughMemory, OutOfMemory, QuantizationUnavailable
from sluice.engine.execution.block_groups import block_groups
from sluice.engine.execution.cuda_graphs import CudaGraphRecorder, EagerGraphRecorder, GraphedDecoder
from sluice.engine.execution.device_errors import guarded
from sluice.engine.execution.graph_buckets import MIXED_TOKENS, Bucket, Buckets, nothing, pad
from sluice.engine.execution.host_blocks import HostBlocks
from sluice.engine.execution.kv_cache import (
    block_bytes,
    blocks_to_allocate,
    check_one_sequence_fits,
    make_grouped_caches,
)
from sluice.engine.execution.launched import LaunchedStep, Undrawn
from sluice.engine.execution.layout import ALIGNED_COLUMNS, BatchLayout
from sluice.engine.execution.memory import give_memory_back, peak_bytes
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.sampling.edited_rows import NO_TOKENS, LastTokens, first_rows
from sluice.engine.execution.sampling.sampler import PreparedRows, Sampler, with_drafts
from sluice.engine.execution.slots import Slots
from sluice.engine.execution.start.determinism import check_deterministic
from sluice.engine.execution.start.kernel_trial import (
    kernels_tried,
    num_processes,
    sizes_of,
    step_down_if_it_fails,
    wanted_kernels,
)
from sluice.engine.execution.start.largest_step import largest_batches
from sluice.engine.execution.start.rehearsal import rehearsal_batches
from sluice.engine.execution.transfers import PendingCopy
from sluice.engine.executor import Launched, ModelLimits
from sluice.engine.models.config import DecoderConfig, parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import ModelFolder, open_model_folder
from sluice.engine.models.inputs import BatchTensors
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.kernels import chain
from sluice.kernels.copy_blocks import block_runs, copy_blocks
from sluice.kernels.paged_attention import FP8

_FP8_CAPABILITY = (8, 9)


class ModelRunner:
    """A model on a device as the engine's executor. One thread at a time."""

    def __init__(self, decoder: Decoder, options: ModelOptions, limits: ModelLimits, fingerprint: str) -> None:
        weights = decoder.weights.embedding
        self._decoder = decoder
        self._limits, self._fingerprint = limits, fingerprint
        dtype = _cache_dtype(options, weights.dtype)
        parts, self._caches = make_grouped_caches(decoder.config, limits, dtype=dtype, device=weights.device)
        self._runs = block_runs(parts)
        self._host = HostBlocks(parts, limits.num_host_blocks)
        self._max_blocks_per_seq = -(-limits.max_model_len // limits.block_size)
        if limits.window_groups:
            self._max_blocks_per_seq = -(-self._max_blocks_per_seq // ALIGNED_COLUMNS) * ALIGNED_COLUMNS
        self._lag = options.lag if options.lag is not None else int(weights.device.type != "cpu")
        # A slot of a step in flight is not used again before the step has landed.
        num_slots = options.max_num_seqs * (1 + self._lag)
        self._slots = Slots(num_slots, self._max_blocks_per_seq, window_groups=limits.window_groups)
        self._layout = BatchLayout(
            self._slots,
            max_num_seqs=options.max_num_seqs,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            device=weights.device,
        )
        self._last = NO_TOKENS
        """What the step launched last has drawn."""

        self._buckets = Buckets(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
        )
        self._sampler = Sampler(
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            # A recorded step may have a row of padding.
            max_rows=options.max_num_seqs + max(1, MAX_DRAFTS),
            device=weights.device,
        )
        self._graphs = self._recordings(options, weights.device)

    @property
    def limits(self) -> ModelLimits:
        """Limits of the model and its cache for the scheduler."""
        return self._limits

    @property
    def fingerprint(self) -> str:
        """Identifies everything that the tokens depend on; equal fingerprints give equal tokens."""
        return self._fingerprint

    @property
    def lag(self) -> int:
        """Steps that may be launched ahead of their results."""
        return self._lag

    @property
    def decoder(self) -> Decoder:
        """The model, for measurements and checks."""
        return self._decoder

    def launch(self, batch: Batch) -> Launched:
        """Start computing every scheduled token and sampling a new one for each sequence that samples.

        Raises:
            OutOfMemory: the device lacks memory for this step now.
            EngineBroken: the device is lost.
        """
        try:
            return guarded(lambda: self._launch(batch))
        except OutOfMemory:
            # Releasing torch's cached pieces may yield a contiguous one.
            give_memory_back(self._device)
            raise

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> Launched:
        self._slots.write(batch)
        self._host.save(batch.saves)
        self._host.load(batch.loads)
        if batch.copies:
            # Before the recorded part, and not in it: the step's tokens attend to what is copied.
            copy_blocks(self._runs, [(copy.source, copy.destination) for copy in batch.copies])
        sampling = [row for row in batch.rows if row.samples]
        prepared = self._prepared(sampling, batch.drafts) if sampling else None
        logits, tokens = self._computed(batch)
        if prepared is None:
            self._last = NO_TOKENS
            return LaunchedStep(Undrawn(PendingCopy((), self._device)), sampling, self._slots, NO_DRAFTS)
        # The rows of padding follow theirs.
        count = len(prepared.slots)
        tokens = tokens[:count] if tokens is not None else None
        drawn = self._sampler.sample(logits[:count], prepared, last=self._last, drawn=tokens)
        if self._lag:
            self._last = LastTokens(first_rows(sampling, batch.drafts), drawn.token_ids)
        return LaunchedStep(drawn, sampling, self._slots, batch.drafts)

    def _prepared(self, sampling: list[ScheduledRow], drafts: Drafts) -> PreparedRows:
        slots = [self._slots[row] for row in sampling]
        positions = [
            row.start + row.num_tokens - slot.num_prompt_tokens for row, slot in zip(sampling, slots, strict=True)
        ]
        if drafts:
            return self._sampler.prepare(
                *with_drafts(slots, positions, [drafts.get(row.sequence_id, ()) for row in sampling])
            )
        return self._sampler.prepare(slots, positions)

    def _computed(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the logits `[R, V]` of the rows of `batch` that sample, then of padding.

        If the step is recorded, it is replayed, and the second tensor `[R]` has the tokens that it drew.
        """
        bucket = self._buckets.of(batch) if self._graphs is not None else None
        if self._graphs is None or bucket is None:
            return self.forward(self._lay_out(batch)), None
        is_due = not self._graphs.has(bucket) and self._graphs.request(bucket)
        if is_due or self._graphs.has(bucket):
            tensors = self._lay_out(pad(batch, bucket))
            if not is_due or self._graphs.record(bucket, tensors):
                logits = self._graphs.forward(tensors, bucket)
                # The next step reads them, after it may have recorded another step, which draws to the same place.
                return logits, self._sampler.options.drawn.clone()
        return self.forward(self._lay_out(batch)), None

    def _recordings(self, options: ModelOptions, device: torch.device) -> GraphedDecoder | None:
        if not _records(options, device):
            return None
        return GraphedDecoder(
            self.forward,
            self._sampler.options.draw,
            CudaGraphRecorder(device) if device.type == "cuda" else EagerGraphRecorder(),
            max_tokens=options.max_num_batched_tokens,
            max_rows=options.max_num_seqs + 1,
            max_blocks_per_seq=self._max_blocks_per_seq,
        )

    @property
    def graphs(self) -> GraphedDecoder | None:
        """Recorded steps, for measurements and checks; None if steps are not recorded."""
        return self._graphs

    @property
    def has_preparations(self) -> bool:
        """Whether idle time can be used: see `prepare`."""
        return self._graphs is not None and self._graphs.most_requested is not None

    def prepare(self) -> None:
        """Record the most wanted step that is not recorded yet, if there is memory for it.

        Raises:
            EngineBroken: the device is lost.
        """
        if self._graphs is None or (bucket := self._graphs.most_requested) is None:
            return
        try:
            guarded(lambda: self._record(bucket))
        except OutOfMemory:
            # Steps work without it. It may be wanted again.
            self._graphs.drop_wish(bucket)
            give_memory_back(self._device)

    def prepare_first(self) -> None:
        """Record the buckets of the start, and copy a block to the unused one, which compiles that kernel too.

        Raises:
            EngineBroken: the device is lost.
        """
        guarded(lambda: copy_blocks(self._runs, [(0, self._limits.num_blocks)]))
        for bucket in self._buckets.first if self._graphs is not None else []:
            guarded(lambda bucket=bucket: self._record(bucket))

    @torch.inference_mode()
    def _record(self, bucket: Bucket) -> None:
        # Padding only: it reads any block and writes to none that a sequence uses.
        if self._graphs is not None:
            self._graphs.record(bucket, self._lay_out(nothing(bucket)))

    def lay_out(self, batch: Batch) -> BatchTensors:
        """Run the first part of `launch`: return the model's inputs, valid until the next call."""
        self._slots.write(batch)
        return self._lay_out(batch)

    def _lay_out(self, batch: Batch) -> BatchTensors:
        return self._layout.lay_out(batch, self._last.rows, self._last.token_ids)

    def forward(self, tensors: BatchTensors) -> Tensor:
        """Run the second part of `launch`: return the logits `[R, V]`, valid until the next call."""
        return self._decoder.forward(tensors, self._caches)

    def time_phases(self, tensors: BatchTensors) -> dict[str, float]:
        """Return seconds per phase of a native step, which is run; for measurements."""
        return self._decoder.time_phases(tensors, self._caches)

    @property
    def _device(self) -> torch.device:
        return self._decoder.weights.embedding.device


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A model folder that fits its options, before its weights are read."""

    options: ModelOptions
    folder: ModelFolder
    config: DecoderConfig
    dtype: torch.dtype
    limits: ModelLimits
    """0 blocks unless the options state them."""

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence."""
        return self.limits.max_model_len


def plan_load(options: ModelOptions) -> LoadPlan:
    """Check a model folder and its options, all but the weights.

    Raises:
        ModelFolderError: the folder is missing, incomplete, corrupt or of an unknown family.
        QuantizationUnavailable: the requested quantization is not supported.
        DeterminismUnavailable: results that do not depend on the batch are not supported.
        NotEnoughMemory: the blocks asked for do not hold the sequence asked for.
    """
    folder = open_model_folder(options.path)
    config = parse_config(folder.config)
    device, dtype = torch.device(options.device), _dtype(folder, options)
    if options.quantization == "int8" and device.type == "cpu" and dtype != torch.bfloat16:
        raise QuantizationUnavailable(
            f"int8 needs a model in bfloat16, this one is {str(dtype).removeprefix('torch.')}: "
            f"set dtype to bfloat16, or drop the quantization."
        )
    if options.is_deterministic:
        check_deterministic(config, dtype, options)
    limits = _limits(folder, config, options, _cache_dtype(options, dtype))
    if options.num_blocks is not None and options.max_model_len is not None:
        check_one_sequence_fits(limits, options.max_num_batched_tokens)
    return LoadPlan(options=options, folder=folder, config=config, dtype=dtype, limits=limits)


def _limits(folder: ModelFolder, config: DecoderConfig, options: ModelOptions, cache_dtype: torch.dtype) -> ModelLimits:
    """Return the model's limits, with the blocks that the options state."""
    windows = config.sliding_windows if options.groups_layers else (0,) * config.num_layers
    groups, device = block_groups(windows), torch.device(options.device)
    bytes_each = block_bytes(config, groups, block_size=options.block_size, dtype=cache_dtype, device=device)
    num_groups = groups.num_window_groups
    window = max(config.sliding_windows) if num_groups else config.window_of_all_layers
    return ModelLimits(
        max_model_len=_max_model_len(config, options),
        vocab_size=config.vocab_size,
        eos_token_ids=folder.eos_token_ids,
        num_blocks=(options.num_blocks or 0) * (1 + num_groups),
        block_size=options.block_size,
        sliding_window=window,
        window_groups=num_groups,
        # Unused with a window.
        num_host_blocks=0 if window else options.host_cache_bytes // bytes_each,
        block_bytes=bytes_each,
    )


def load_model_runner(options: ModelOptions) -> ModelRunner:
    """Load a model folder onto its device.

    Raises:
        ModelFolderError: as in `plan_load`, or the weights do not belong to the config.
        QuantizationUnavailable: the requested quantization is not supported.
        NotEnoughMemory: the memory allowed does not hold one sequence.
    """
    return load_planned(plan_load(options))


def load_planned(plan: LoadPlan) -> ModelRunner:
    """Load the weights of a plan onto its device.

    Raises:
        ModelFolderError: they do not belong to the config, or are corrupt.
        NotEnoughMemory: the memory allowed does not hold one sequence.
    """
    options, config, device = plan.options, plan.config, torch.device(plan.options.device)
    is_int8 = options.quantization == "int8"
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    if device.type == "cuda":
        # Triton launches on the thread's current device, whatever the tensors' device. torch needs an index here.
        torch.cuda.set_device(device.index or 0)
    rehearses = options.rehearses and device.type == "cuda"
    processes = num_processes(plan.folder.weights.files, device) if rehearses else 0
    with (
        torch.inference_mode(),
        kernels_tried(
            sizes_of(plan.config, plan.dtype, options, plan.max_model_len),
            options.device,
            wanted_kernels(options),
            processes,
        ),
    ):
        decoder = load_decoder(
            config,
            plan.folder.weights,
            form=WeightForm(plan.dtype, device, is_int8=is_int8),
            max_model_len=plan.max_model_len,
            max_tokens=options.max_num_batched_tokens,
        )
    if rehearses:
        _rehearse(decoder, plan)
    limits = replace(
        plan.limits,
        eos_token_ids=plan.limits.eos_token_ids | options.end_token_ids,
        num_blocks=blocks_to_allocate(plan.limits, options, lambda: _step_bytes(decoder, options, plan.max_model_len)),
    )
    runner = ModelRunner(decoder, options, limits, _fingerprint(plan))
    runner.prepare_first()
    return runner


def _fingerprint(plan: LoadPlan) -> str:
    options, is_cuda = plan.options, torch.device(plan.options.device).type == "cuda"
    return plan.folder.fingerprint(
        plan.dtype,
        is_int8=options.quantization == "int8",
        has_fp8_cache=options.kv_cache_dtype == "fp8",
        kernels=chain.description() if is_cuda else "",
        angles_for=plan.max_model_len if plan.config.rope.depends_on_length else None,
    )


def _dtype(folder: ModelFolder, options: ModelOptions) -> torch.dtype:
    dtype = folder.dtype(options.dtype)
    # There are no CPU kernels for float16: products would be widened one by one.
    if options.dtype == "auto" and options.device == "cpu" and dtype == torch.float16:
        return torch.bfloat16
    return dtype


def _cache_dtype(options: ModelOptions, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of keys and values for a model in `dtype`.

    Raises:
        QuantizationUnavailable: this GPU has no 8-bit floats.
    """
    if options.kv_cache_dtype == "auto":
        return dtype
    device = torch.device(options.device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise QuantizationUnavailable(
            f"a KV cache in fp8 needs a GPU of compute capability 8.9 or more, this is {options.device}: "
            f"{torch.cuda.get_device_name(device)}."
        )
    return FP8


def _max_model_len(config: DecoderConfig, options: ModelOptions) -> int:
    longest = config.rope.longest_context
    if config.rope.type == "dynamic":
        # This embedding extends to any requested length.
        return options.max_model_len or longest
    if options.max_model_len is not None and options.max_model_len > longest:
        raise ModelFolderError(
            f"max_model_len is {options.max_model_len}, but this model's context is {longest} tokens."
        )
    return options.max_model_len or longest


def _rehearse(decoder: Decoder, plan: LoadPlan) -> None:
    """Run steps of every kind, so that what a step uses first is compiled and loaded now.

    Raises:
        NotEnoughMemory: there is none for the largest steps.
        KernelsUnavailable: a kernel fails, and only Triton's may be used.
    """
    options = plan.options
    batches = rehearsal_batches(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=options.block_size,
    )
    _run_all(_small_runner(decoder, options, plan.max_model_len), batches, options)
    # What torch keeps of the steps would not be free for the cache.
    give_memory_back(torch.device(options.device))


def _run_all(runner: ModelRunner, batches: Iterable[Batch], options: ModelOptions) -> None:
    for batch in batches:
        with _memory_for_steps(options):
            step_down_if_it_fails(lambda batch=batch: runner.launch(batch).collect(), wanted_kernels(options))


def _small_runner(decoder: Decoder, options: ModelOptions, max_model_len: int) -> ModelRunner:
    """Return a runner with one block, for steps whose results are meaningless."""
    limits = ModelLimits(
        max_model_len=max_model_len,
        vocab_size=decoder.config.vocab_size,
        eos_token_ids=frozenset(),
        num_blocks=1,
        block_size=options.block_size,
    )
    return ModelRunner(decoder, replace(options, graphs=False), limits, fingerprint="")


@contextmanager
def _memory_for_steps(options: ModelOptions) -> Generator[None]:
    try:
        yield
    except OutOfMemory as error:
        raise NotEnoughMemory(
            f"there is no memory for a step of {options.max_num_batched_tokens} tokens and {options.max_num_seqs} "
            f"sequences ({error}). Lower one of them, or use a smaller model."
        ) from error


def _step_bytes(decoder: Decoder, options: ModelOptions, max_model_len: int) -> int:
    """Return the memory that the largest steps take beyond weights and cache; 0 if it is not measured."""
    device = torch.device(options.device)
    if not (device.type == "cuda" if options.measures_steps is None else options.measures_steps):
        return 0
    runner = _small_runner(decoder, options, max_model_len)

    def peak_of(max_num_batched_tokens: int) -> int:
        batches = largest_batches(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=options.block_size,
            max_drafts=MAX_DRAFTS if options.speculates else 0,
        )
        with _memory_for_steps(options):
            return peak_bytes(device, lambda: [runner.launch(batch).collect() for batch in batches])

    peak = peak_of(options.max_num_batched_tokens)
    if not _records(options, device):
        return peak
    # Recorded steps have a separate memory pool, which no other step uses.
    largest_recorded = min(options.max_num_batched_tokens, MIXED_TOKENS[-1])
    return peak + (peak if largest_recorded == options.max_num_batched_tokens else peak_of(largest_recorded))


def _records(options: ModelOptions, device: torch.device) -> bool:
    if device.type == "cuda" and not chain.can_record():
        return False
    return device.type == "cuda" if options.graphs is None else options.graphs
