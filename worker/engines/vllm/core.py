# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN401
# vLLM is installed in an environment of its own, so its types are unknown here.
"""A loaded vLLM. The only module that imports it, and all that depends on one of its releases.

vLLM's own queue and scheduler are not used: `Core.step` gives its model executor one planned step at a time, as its
scheduler would, and the sampler of each of its workers is replaced by ours.
"""

import os
from argparse import ArgumentError, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args

import torch
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.outputs import SamplerOutput
from vllm.version import __version__

from sluice.engine.adapters.folder import AdapterFolder
from sluice.engine.batch import Sampled
from sluice.engine.errors import AdapterError, OutOfMemory
from sluice.worker.engines.options import flags_of, refused_option
from sluice.worker.engines.vllm.orders import CoreFacts, Draws, KnownSequence, NewSequence, StepOrder
from sluice.worker.engines.vllm.sampling import RowSampler
from sluice.worker.errors import ConfigError
from sluice.worker.signals import end_with_parent

_SLOT = "sluice"
"""Our key in the extra arguments of vLLM's sampling parameters."""

_DRAWS, _SAMPLED = "sluice_draws", "sluice_sampled"
"""Our attributes of a planned step, and of its output. They travel with them between processes."""

_MEMORY_IN_USE = "Free memory on device"
"""Begins vLLM's error if a device has too little memory now: a process that ends may leave more."""

_REFUSED_OPTIONS = {
    "speculative_config": "its steps verify no drafts here",
    "logits_processors": "tokens are drawn by Sluice's sampler",
    "enable_lora": "adapters are named by --adapters",
}

_OF_SETTINGS = ("block_size", "gpu_memory_utilization", "max_lora_rank", "max_loras", "num_gpu_blocks_override")
"""Options that the worker's settings decide, also where they state nothing."""

_NOTHING = Draws(frozenset(), {})


class _Parser(FlexibleArgumentParser):
    """vLLM's parser of its own arguments, which raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parsed(stated: Mapping[str, object], options: Sequence[str]) -> EngineArgs:
    flags = flags_of(options, decided={*stated, *_OF_SETTINGS}, refused=_REFUSED_OPTIONS)
    # Abbreviations would pass by what is refused.
    parser = EngineArgs.add_cli_args(_Parser(exit_on_error=False, allow_abbrev=False))
    try:
        return EngineArgs.from_cli_args(parser.parse_args(flags, Namespace(**_with_room(stated))))
    except (ArgumentError, SystemExit, ValueError) as error:
        raise refused_option(f"vLLM {__version__} refuses {' '.join(options)}: {_sentence(error)}") from error


def _with_room(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with as much room for adapters as vLLM needs to hold them."""
    if "max_loras" not in stated:
        return dict(stated)
    ranks, rank = sorted(get_args(MaxLoRARanks)), stated["max_lora_rank"]
    if rank > ranks[-1]:
        raise AdapterError(f"an adapter has rank {rank}, and vLLM's highest is {ranks[-1]}.")
    return {
        **stated,
        "max_lora_rank": next(one for one in ranks if one >= rank),
        # Its products on a CPU compute a row without an adapter with the last place: one more, which stays empty.
        "max_loras": stated["max_loras"] + current_platform.is_cpu(),
    }


def _refused(why: str) -> ConfigError:
    return ConfigError([f"SLUICE_MODEL: vLLM cannot run it: {why}"])


def _sentence(error: BaseException) -> str:
    """Return the first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Pydantic's first line counts the errors, and the others end with the input.
    said = next((line for line in lines if "validation error" not in line), type(error).__name__)
    return said.partition(" [type=")[0].removeprefix("Value error, ").rstrip(".")


class VllmCore:
    """The core. One thread owns it."""

    def __init__(self, stated: Mapping[str, object], options: Sequence[str], *, eos_token_ids: frozenset[int]) -> None:
        """Load a model.

        Args:
            stated: vLLM's arguments that the worker decides.
            options: further ones, `name=value`, which vLLM's own parser checks.
            eos_token_ids: the model's end-of-sequence tokens.

        Raises:
            ConfigError: vLLM refuses an option, or cannot run the model, or not so that its jobs can be resumed.
            Exception: as vLLM raises it.
        """
        try:
            config = _parsed(stated, options).create_engine_config()
        except ValueError as error:
            raise _refused(_sentence(error)) from error
        if config.use_v2_model_runner:
            raise _refused("its second model runner draws tokens in another way: set VLLM_USE_V2_MODEL_RUNNER=0")
        self.why_lost: str | None = None
        """See `executor.Core.why_lost`."""

        try:
            self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        except ValueError as error:
            if _MEMORY_IN_USE in str(error):
                raise OutOfMemory(f"{_sentence(error).partition('. ')[0]}, set by SLUICE_MEMORY_FRACTION") from error
            raise _refused(_sentence(error)) from error
        self._executor = self._core.model_executor
        self._executor.register_failure_callback(self._note_lost)
        self._adapters: dict[int, LoRARequest] = {}
        """By place."""

        self._sends_tokens = config.parallel_config.pipeline_parallel_size > 1
        max_rows = config.scheduler_config.max_num_seqs
        backends = self._executor.collective_rpc(replace_sampler, args=(eos_token_ids, max_rows, os.getpid()))
        self.facts = _facts(config, self._core, sorted(set(backends)))

    def put_adapter(self, place: int, folder: AdapterFolder) -> None:
        """Load an adapter into a place: see `executor.Core.put_adapter`."""
        # vLLM never needs the room of one that is in use: it has as many as there are places.
        name, path = folder.name, str(folder.path.absolute())
        try:
            self._executor.add_lora(LoRARequest(name, 1 + place, path, load_inplace=True))
        except Exception as error:
            raise AdapterError(f"vLLM cannot use the adapter {name!r}: {_sentence(error)}.") from error
        self._adapters[place] = LoRARequest(name, 1 + place, path)

    def step(self, order: StepOrder) -> dict[str, Sampled]:
        """Compute a step, and return what it drew: see `executor.Core.step`."""
        try:
            output = self._executor.execute_model(self._planned(order))
            if output is None:
                output = self._executor.sample_tokens(None)
        except TimeoutError:
            # A late answer would be taken for that of another step.
            self.why_lost = "one of its worker processes does not answer"
            raise
        return getattr(output, _SAMPLED)

    def _planned(self, order: StepOrder) -> SchedulerOutput:
        planned = SchedulerOutput(
            scheduled_new_reqs=[self._new(sequence) for sequence in order.new],
            scheduled_cached_reqs=self._known(order.known),
            num_scheduled_tokens=order.num_tokens,
            total_num_scheduled_tokens=sum(order.num_tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=order.forgotten,
            free_encoder_mm_hashes=[],
            kv_cache_block_copies=[KVCacheBlockCopy(*pair) for pair in order.copies] or None,
        )
        # Travels with it to all ranks. vLLM's own masks would change the logits that log-probabilities are of.
        setattr(planned, _DRAWS, order.draws)
        return planned

    def _new(self, sequence: NewSequence) -> NewRequestData:
        slot = sequence.slot
        return NewRequestData(
            req_id=sequence.id,
            prompt_token_ids=list(slot.token_ids),
            mm_features=[],
            # Its options are not used: our sampler draws. Greedy needs no generator.
            sampling_params=SamplingParams(temperature=0.0, detokenize=False, extra_args={_SLOT: slot}),
            pooling_params=None,
            block_ids=sequence.block_ids,
            num_computed_tokens=sequence.num_computed_tokens,
            lora_request=self._adapters[slot.adapter_place] if slot.adapter_place >= 0 else None,
        )

    def _known(self, known: list[KnownSequence]) -> CachedRequestData:
        return CachedRequestData(
            req_ids=[sequence.id for sequence in known],
            resumed_req_ids=set(),
            new_token_ids=[sequence.token_ids for sequence in known] if self._sends_tokens else [],
            all_token_ids={},
            new_block_ids=[sequence.new_block_ids for sequence in known],
            num_computed_tokens=[sequence.num_computed_tokens for sequence in known],
            num_output_tokens=[sequence.num_drawn_tokens for sequence in known],
        )

    def _note_lost(self) -> None:
        self.why_lost = "one of its worker processes has ended"


def _facts(config: Any, core: EngineCore, backends: list[str]) -> CoreFacts:
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if not groups or len(sizes) > 1 or not all(_is_attention(group.kv_cache_spec) for group in groups):
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups}) or ["no cache"]
        raise _refused(f"it keeps other state than keys and values of every token ({', '.join(kinds)})")
    parallel, model = config.parallel_config, config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    description = (
        f"vllm {__version__} {'+'.join(backends)} {dtype} cache {config.cache_config.cache_dtype} "
        f"quantization {model.quantization} tp {parallel.tensor_parallel_size} pp {parallel.pipeline_parallel_size}"
    )
    return CoreFacts(
        version=__version__,
        description=description,
        num_blocks=core.scheduler.kv_cache_config.num_blocks,
        block_size=sizes.pop(),
        num_groups=len(groups),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        block_bytes=sum(group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups),
        dtype=dtype,
        quantization=model.quantization,
    )


def _is_attention(spec: Any) -> bool:
    inner = getattr(spec, "kv_cache_specs", None)
    return all(map(_is_attention, inner.values())) if inner is not None else isinstance(spec, AttentionSpec)


# ------------------------------------------------------------ in vLLM's workers


def replace_sampler(worker: Any, eos_token_ids: frozenset[int], max_rows: int, engine_pid: int) -> str:
    """Let a worker of vLLM draw tokens by our sampler; return the name of its attention backend.

    A child of the engine's process also ends with it from now on, even while it waits for another in native code.
    """
    if os.getppid() == engine_pid:
        end_with_parent()
    runner = worker.model_runner
    runner.sampler = sampler = _Sampler(runner, eos_token_ids, max_rows)
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(planned: SchedulerOutput, *others: Any) -> Any:
        sampler.draws = getattr(planned, _DRAWS, _NOTHING)
        return execute(planned, *others)

    def sample_tokens(*arguments: Any) -> Any:
        output = sample(*arguments)
        setattr(output, _SAMPLED, sampler.sampled)
        return output

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
    return "/".join(sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}))


class _Sampler(RowSampler):
    """Our sampler in the place of vLLM's, for the rows of its persistent batch."""

    def __init__(self, runner: Any, eos_token_ids: frozenset[int], max_rows: int) -> None:
        self._runner = runner
        self.draws = _NOTHING
        """Those of the step that is computed."""

        super().__init__(
            vocab_size=runner.model_config.get_vocab_size(),
            eos_token_ids=eos_token_ids,
            max_rows=max_rows,
            device=runner.device,
        )

    def __call__(self, *, logits: torch.Tensor, sampling_metadata: object) -> SamplerOutput:
        """Draw a token for each row: `[R, V]` logits; the metadata is that of vLLM's own options."""
        requests = self._runner.requests
        names = self._runner.input_batch.req_ids
        rows = [(name, requests[name].sampling_params.extra_args[_SLOT]) for name in names]
        return SamplerOutput(sampled_token_ids=self.draw(logits, rows, self.draws), logprobs_tensors=None)
