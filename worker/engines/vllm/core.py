# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN401
# vLLM is installed in an environment of its own, so its types are unknown here.
"""A loaded vLLM. The only module that imports it, and all that depends on one of its releases.

vLLM's own queue and scheduler are not used: `Core.step` gives its model executor one planned step at a time, as its
scheduler would, and the sampler of each of its workers is replaced by ours.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput, SamplerOutput
from vllm.version import __version__

from sluice.engine.errors import OutOfMemory
from sluice.engine.request import SampledLogprobs
from sluice.worker.engines.vllm.orders import (
    CoreFacts,
    Drawing,
    Drawn,
    Draws,
    KnownSequence,
    NewSequence,
    Refused,
    StepOrder,
)
from sluice.worker.engines.vllm.sampling import NO_TOKEN, DrawnRows, Row, RowSampler
from sluice.worker.signals import end_with_parent

_DRAWING = "sluice"
"""Our key in the extra arguments of vLLM's sampling parameters."""

_DRAWS = "sluice_draws"
"""Our attribute of a planned step."""

_MEMORY_IN_USE = "Free memory on device"
"""Begins vLLM's error if a device has too little memory now: a process that ends may leave more."""

_REFUSED_OPTIONS = {
    "speculative_config": "its steps verify no drafts here",
    "logits_processors": "tokens are drawn by Sluice's sampler",
}


_NOTHING = Draws(frozenset(), {})


class _Parser(FlexibleArgumentParser):
    """vLLM's parser of its own arguments, which raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def open_core(settings: Mapping[str, object], options: Sequence[str], *, eos_token_ids: frozenset[int]) -> "VllmCore":
    """Load a model.

    Args:
        settings: vLLM's arguments that the worker decides.
        options: further ones, `name=value`, which vLLM's own parser checks.
        eos_token_ids: the model's end-of-sequence tokens.

    Raises:
        Refused: vLLM refuses an option, or cannot run the model, or not so that its jobs can be resumed.
        Exception: as vLLM raises it.
    """
    return VllmCore(_parsed(settings, options), eos_token_ids=eos_token_ids)


def _parsed(settings: Mapping[str, object], options: Sequence[str]) -> EngineArgs:
    given: list[str] = []
    for option in options:
        name, has_value, value = option.partition("=")
        flag = "--" + name.strip().lstrip("-").replace("_", "-")
        field = flag[2:].replace("-", "_")
        if field in settings:
            raise Refused(f"{name} has a setting of the worker's own, or must be as the worker sets it")
        if field in _REFUSED_OPTIONS:
            raise Refused(f"{name} would do nothing: {_REFUSED_OPTIONS[field]}")
        if value.lower() == "false":
            given.append(f"--no-{flag[2:]}")
        else:
            given += [flag, value] if has_value and value.lower() != "true" else [flag]
    parser = EngineArgs.add_cli_args(_Parser(exit_on_error=False))
    try:
        known = vars(parser.parse_args(given))
    except (Refused, SystemExit, ValueError) as error:
        raise Refused(f"vLLM {__version__} refuses {' '.join(options)}: {_sentence(error)}") from error
    return EngineArgs(**{one.name: known[one.name] for one in fields(EngineArgs) if one.name in known} | dict(settings))


def _sentence(error: BaseException) -> str:
    """Return the first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Pydantic's first line counts the errors, and the others end with the input.
    said = next((line for line in lines if "validation error" not in line), type(error).__name__)
    return said.partition(" [type=")[0].removeprefix("Value error, ").rstrip(".")


class VllmCore:
    """The core. One thread owns it."""

    def __init__(self, args: EngineArgs, *, eos_token_ids: frozenset[int]) -> None:
        try:
            config = args.create_engine_config()
        except ValueError as error:
            raise Refused(_sentence(error)) from error
        if config.use_v2_model_runner:
            raise Refused("its second model runner draws tokens in another way: set VLLM_USE_V2_MODEL_RUNNER=0")
        self._lost: str | None = None
        try:
            self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        except ValueError as error:
            if _MEMORY_IN_USE in str(error):
                raise OutOfMemory(f"{_sentence(error).partition('. ')[0]}, set by SLUICE_MEMORY_FRACTION") from error
            raise Refused(_sentence(error)) from error
        self._executor = self._core.model_executor
        self._executor.register_failure_callback(self._note_lost)
        self._sends_tokens = config.parallel_config.pipeline_parallel_size > 1
        max_rows = config.scheduler_config.max_num_seqs
        backends = self._executor.collective_rpc(replace_sampler, args=(eos_token_ids, max_rows, os.getpid()))
        self.facts = _facts(config, self._core, sorted(set(backends)))

    @property
    def why_lost(self) -> str | None:
        """Why its workers compute nothing more; None while they do."""
        return self._lost

    def step(self, order: StepOrder) -> dict[str, Drawn]:
        """Compute a step, and return what it drew: see `executor.Core.step`."""
        try:
            output = self._executor.execute_model(self._planned(order))
            if output is None:
                output = self._executor.sample_tokens(None)
        except TimeoutError:
            # A late answer would be taken for that of another step.
            self._lost = "one of its worker processes does not answer"
            raise
        return _drawn(output, order)

    def _planned(self, order: StepOrder) -> SchedulerOutput:
        planned = SchedulerOutput(
            scheduled_new_reqs=[_new(sequence) for sequence in order.new],
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
        self._lost = "one of its worker processes has ended"


def _new(sequence: NewSequence) -> NewRequestData:
    return NewRequestData(
        req_id=sequence.id,
        prompt_token_ids=sequence.token_ids,
        mm_features=[],
        # Its options are not used: our sampler draws. Greedy needs no generator.
        sampling_params=SamplingParams(temperature=0.0, detokenize=False, extra_args={_DRAWING: sequence.drawing}),
        pooling_params=None,
        block_ids=sequence.block_ids,
        num_computed_tokens=sequence.num_computed_tokens,
        lora_request=None,
        prefill_token_ids=sequence.token_ids,
    )


def _drawn(output: ModelRunnerOutput, order: StepOrder) -> dict[str, Drawn]:
    """Read what was drawn for the sequences of a step."""
    drawn: dict[str, Drawn] = {}
    for name in order.num_tokens:
        row = output.req_id_to_index[name]
        token_ids = output.sampled_token_ids[row]
        if not token_ids:
            continue  # not all its known tokens are computed
        [token_id] = token_ids
        logprobs = None
        if output.logprobs is not None:
            logprobs = _read_logprobs(
                output.logprobs.logprob_token_ids[row].tolist(), output.logprobs.logprobs[row].tolist()
            )
        drawn[name] = Drawn(None if token_id == NO_TOKEN else token_id, logprobs)
    return drawn


def _read_logprobs(token_ids: list[int], values: list[float]) -> SampledLogprobs | None:
    """Read a row of `_with_logprobs`."""
    if token_ids[0] == NO_TOKEN:
        return None
    count = token_ids[0]
    return SampledLogprobs(
        chosen=values[0], top=tuple(zip(token_ids[1 : count + 1], values[1 : count + 1], strict=True))
    )


def _facts(config: Any, core: EngineCore, backends: list[str]) -> CoreFacts:
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if not groups or len(sizes) > 1 or not all(_is_attention(group.kv_cache_spec) for group in groups):
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups}) or ["no cache"]
        raise Refused(f"it keeps other state than keys and values of every token ({', '.join(kinds)})")
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
    sampler, execute = _Sampler(runner, eos_token_ids, max_rows), runner.execute_model

    def execute_model(planned: SchedulerOutput, *others: Any) -> Any:
        sampler.draws = getattr(planned, _DRAWS, _NOTHING)
        return execute(planned, *others)

    runner.sampler, runner.execute_model = sampler, execute_model
    return "/".join(sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}))


class _Sampler:
    """Our sampler in the place of vLLM's, for the rows of its persistent batch."""

    def __init__(self, runner: Any, eos_token_ids: frozenset[int], max_rows: int) -> None:
        self._runner = runner
        self.draws = _NOTHING
        """Those of the step that is computed."""

        self._rows = RowSampler(
            vocab_size=runner.model_config.get_vocab_size(),
            eos_token_ids=eos_token_ids,
            max_rows=max_rows,
            device=runner.device,
        )

    def __call__(self, *, logits: torch.Tensor, sampling_metadata: object) -> SamplerOutput:
        """Draw a token for each row: `[R, V]` logits; the metadata is that of vLLM's own options."""
        requests = self._runner.requests
        self._rows.keep(requests)
        rows = [_row(requests[name]) for name in self._runner.input_batch.req_ids]
        drawn = self._rows.draw(logits, rows, self.draws)
        token_ids = torch.full((len(rows), 1), NO_TOKEN, dtype=torch.int32, device=logits.device)
        if drawn is None:
            return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=None)
        token_ids[drawn.rows, 0] = drawn.drawn.token_ids.to(torch.int32)
        return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=_with_logprobs(drawn, len(rows)))


def _row(request: Any) -> Row:
    drawing: Drawing = request.sampling_params.extra_args[_DRAWING]
    return Row(request.req_id, drawing, request.prompt_token_ids, request.output_token_ids)


def _with_logprobs(of_rows: DrawnRows, num_rows: int) -> LogprobsTensors | None:
    """Return the log-probabilities of the rows that want some, in vLLM's form: its own is of all rows.

    The first column has that of the drawn token and, instead of its id, the number of the others; NO_TOKEN in rows that
    want none.
    """
    drawn = of_rows.drawn
    if not drawn.num_asked:
        return None
    _, chosen, values, token_ids = drawn.pending_copy.wait()
    rows, counts = [of_rows.rows[number] for number in drawn.num_asked], list(drawn.num_asked.values())
    all_values = torch.zeros(num_rows, 1 + values.shape[1])
    all_ids = torch.full(all_values.shape, NO_TOKEN, dtype=torch.int32)
    all_values[rows] = torch.cat((chosen, values), dim=1)
    all_ids[rows, 0], all_ids[rows, 1:] = torch.tensor(counts, dtype=torch.int32), token_ids.int()
    return LogprobsTensors(all_ids, all_values, torch.zeros(num_rows, dtype=torch.int32))
