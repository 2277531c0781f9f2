"""From a model folder to a `ModelRunner`: check the plan, read the weights, try the kernels, measure steps, allocate.

Read `plan_load`, which needs no weights, then `load_planned`.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from sluice.engine.adapters.catalogue import NO_ADAPTERS, Catalogue, read_catalogue
from sluice.engine.adapters.folder import AdapterFolder
from sluice.engine.adapters.modules import modules_of
from sluice.engine.adapters.table import AdapterTable
from sluice.engine.adapters.weights import AdapterWeights, check_adapters
from sluice.engine.batch import MAX_DRAFTS, Batch
from sluice.engine.errors import ModelFolderError, NotEnoughMemory, OutOfMemory, QuantizationUnavailable
from sluice.engine.execution.block_groups import block_groups
from sluice.engine.execution.kv_cache import block_bytes, blocks_to_allocate, cache_dtype, check_one_sequence_fits
from sluice.engine.execution.memory import give_memory_back, peak_bytes
from sluice.engine.execution.model_runner import ModelRunner, records_steps
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.recordings.buckets import Buckets
from sluice.engine.execution.recordings.cuda_graphs import RECORDING_BYTES
from sluice.engine.execution.start.determinism import check_deterministic, is_bitwise
from sluice.engine.execution.start.kernel_trial import (
    allowed_kernels,
    kernels_tried,
    num_processes,
    sizes_of,
    step_down_if_it_fails,
)
from sluice.engine.execution.start.largest_step import largest_batches
from sluice.engine.execution.start.warm_up import warm_up_batches
from sluice.engine.execution.threads import default_num_threads
from sluice.engine.executor import ModelLimits
from sluice.engine.models.config import DecoderConfig, parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import ModelFolder, open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.engine.models.weights import HEAD
from sluice.kernels import chain
from sluice.kernels.adapters.products import AdaptedProducts, AdapterRoom
from sluice.kernels.linear.words import WordForm
from sluice.kernels.trial.sizes import ModelSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A model folder that fits its options, before its weights are read."""

    options: ModelOptions
    folder: ModelFolder
    config: DecoderConfig
    dtype: torch.dtype
    limits: ModelLimits
    """0 blocks unless the options state them."""

    catalogue: Catalogue = NO_ADAPTERS

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence."""
        return self.limits.max_model_len

    @property
    def form(self) -> WeightForm:
        """How the weights are kept: those of a mixture are not packed on a GPU, whose products of experts are plain."""
        form = WeightForm(self.dtype, torch.device(self.options.device), quantization=self.options.quantization)
        is_plain = form.quantization == "auto" and form.is_on_gpu and self.config.mixture is not None
        return replace(form, quantization="none") if is_plain else form

    @property
    def word_forms(self) -> frozenset[WordForm]:
        """The forms of the weights that a GPU's products read packed."""
        return self.folder.weights.word_forms if self.form.is_on_gpu and self.form.keeps_packed else frozenset()

    @property
    def sizes(self) -> ModelSizes:
        """The sizes and options that its kernels depend on."""
        return sizes_of(
            self.config,
            self.dtype,
            self.options,
            self.max_model_len,
            adapter_rank=self.catalogue.max_rank,
            word_forms=self.word_forms,
        )

    @property
    def is_bitwise(self) -> bool:
        """Whether no result depends on what else is in a step."""
        return is_bitwise(self.config, self.dtype, self.options)


def plan_load(options: ModelOptions) -> LoadPlan:
    """Check a model folder and its options, all but the weights.

    Raises:
        ModelFolderError: the folder is missing, incomplete, corrupt or of an unknown family.
        QuantizationUnavailable: the requested quantization is not supported.
        DeterminismUnavailable: results that do not depend on the batch are not supported.
        AdapterError: an adapter cannot be used with the model.
        NotEnoughMemory: the blocks asked for do not hold the sequence asked for.
    """
    folder = open_model_folder(options.path)
    config = parse_config(folder.config)
    device, dtype = torch.device(options.device), _dtype(folder, options)
    rounds = options.quantization in ("int8", "int4")
    if rounds and device.type == "cpu" and dtype != torch.bfloat16:
        raise QuantizationUnavailable(
            f"{options.quantization} needs a model in bfloat16, this one is {str(dtype).removeprefix('torch.')}: "
            f"set dtype to bfloat16, or drop the quantization."
        )
    if options.quantization == "int4" and device.type != "cpu":
        raise QuantizationUnavailable("int4 needs a CPU: on a GPU there are products of int8 only.")
    if options.is_deterministic:
        check_deterministic(config, dtype, options)
    catalogue = _catalogue(options, config)
    limits = _limits(folder, config, options, cache_dtype(options, dtype))
    if options.num_blocks is not None and options.max_model_len is not None:
        check_one_sequence_fits(limits, options.max_num_batched_tokens)
    plan = LoadPlan(options=options, folder=folder, config=config, dtype=dtype, limits=limits, catalogue=catalogue)
    if plan.form.multiplies_float8:
        plan = replace(plan, folder=replace(folder, weights=folder.weights.with_float8()))
    if not catalogue.adapters:
        return plan
    max_loaded = options.max_loaded_adapters
    return replace(plan, limits=catalogue.limits_with(limits, of_model=_fingerprint(plan), max_loaded=max_loaded))


def _catalogue(options: ModelOptions, config: DecoderConfig) -> Catalogue:
    """Read the adapters, and check that each is one of this model.

    Raises:
        AdapterError: one is not, or cannot be used.
    """
    if options.adapters is None:
        return NO_ADAPTERS
    catalogue = read_catalogue(options.adapters)
    check_adapters(catalogue, config)
    return catalogue


def _limits(folder: ModelFolder, config: DecoderConfig, options: ModelOptions, kv_dtype: torch.dtype) -> ModelLimits:
    """Return the model's limits, with the blocks that the options state."""
    windows = config.sliding_windows if options.groups_layers else (0,) * config.num_layers
    groups, device = block_groups(windows), torch.device(options.device)
    bytes_each = block_bytes(config, groups, block_size=options.block_size, dtype=kv_dtype, device=device)
    num_groups = groups.num_window_groups
    window = max(config.sliding_windows) if num_groups else config.window_of_all_layers
    return ModelLimits(
        max_model_len=_max_model_len(config, options),
        vocab_size=config.vocab_size,
        eos_token_ids=folder.eos_token_ids(config.vocab_size),
        num_blocks=(options.num_blocks or 0) * (1 + num_groups),
        block_size=options.block_size,
        sliding_window=window,
        window_groups=num_groups,
        # Unused with a window.
        num_host_blocks=0 if window else options.host_cache_bytes // bytes_each,
        hidden_size=config.hidden_size,
        num_classes=folder.weights.num_rows(HEAD),
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
    num_threads = options.num_threads or default_num_threads()
    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)
    if device.type == "cuda":
        # Triton launches on the thread's current device, whatever the tensors' device. torch needs an index here.
        torch.cuda.set_device(device.index or 0)
    warms_up = options.warms_up and device.type == "cuda"
    processes = num_processes(plan.folder.weights.files, device) if warms_up else 0
    with (
        torch.inference_mode(),
        kernels_tried(plan.sizes, options.device, allowed_kernels(options), processes),
    ):
        decoder = load_decoder(
            config,
            plan.folder.weights,
            form=plan.form,
            max_model_len=plan.max_model_len,
            max_tokens=options.max_num_batched_tokens,
        )
    adapters = _adapter_table(decoder, plan)
    if warms_up:
        warm_up(decoder, plan)
    limits = replace(
        plan.limits,
        eos_token_ids=plan.limits.eos_token_ids | options.end_token_ids,
        num_blocks=blocks_to_allocate(plan.limits, options, lambda: _step_bytes(decoder, options, plan.max_model_len)),
    )
    runner = ModelRunner(decoder, options, limits, _fingerprint(plan), adapters)
    runner.prepare_first()
    return runner


def _adapter_table(decoder: Decoder, plan: LoadPlan) -> AdapterTable | None:
    """Make room for the adapters, before the memory that is left is measured; None if there are none."""
    if not plan.catalogue.adapters:
        return None
    room = AdapterRoom(
        num_places=plan.limits.max_adapters,
        max_rank=plan.catalogue.max_rank,
        max_tokens=plan.options.max_num_batched_tokens,
    )
    modules, weights = modules_of(plan.config), decoder.weights
    products = AdaptedProducts(weights.adapted, [of.sizes for of in modules], room, like=weights.final_norm)
    decoder.use_adapters(products)

    def put(place: int, folder: AdapterFolder) -> None:
        products.put(place, AdapterWeights(folder, modules).pairs(plan.dtype))

    return AdapterTable(plan.catalogue, put)


def _fingerprint(plan: LoadPlan) -> str:
    options, is_cuda = plan.options, torch.device(plan.options.device).type == "cuda"
    return plan.folder.fingerprint(
        plan.dtype,
        scheme=plan.form.scheme(plan.folder.weights),
        cache="" if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        kernels=chain.description() if is_cuda else "",
        angles_for=plan.max_model_len if plan.config.rope.depends_on_length else None,
    )


def _dtype(folder: ModelFolder, options: ModelOptions) -> torch.dtype:
    dtype = folder.dtype(options.dtype)
    # There are no CPU kernels for float16: products would be widened one by one.
    if options.dtype == "auto" and options.device == "cpu" and dtype == torch.float16:
        return torch.bfloat16
    return dtype


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


def warm_up(decoder: Decoder, plan: LoadPlan) -> None:
    """Run steps of every kind, so that the code of a first step is compiled and loaded now.

    Raises:
        NotEnoughMemory: there is none for the largest steps.
        KernelsUnavailable: a kernel fails, and only Triton's may be used.
    """
    options = plan.options
    batches = warm_up_batches(
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
            step_down_if_it_fails(lambda batch=batch: runner.launch(batch).collect(), allowed_kernels(options))


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
    if not records_steps(options, device):
        return peak
    # Recorded steps have a separate memory pool, which no other step uses.
    buckets = Buckets(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    of_pool = peak if buckets.most_tokens == options.max_num_batched_tokens else peak_of(buckets.most_tokens)
    weights = decoder.weights
    of_logits = (options.max_num_seqs + 1) * decoder.config.vocab_size * weights.dtype.itemsize
    return peak + of_pool + of_logits + len(buckets.first) * RECORDING_BYTES
