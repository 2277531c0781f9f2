"""Prepare and load the draft model of a worker: a folder with the tokenizer of the model that it guesses for.

Imported only with a real model: it imports torch.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from sluice.engine.config import EngineConfig, StepLimits
from sluice.engine.errors import ModelFolderError, NotEnoughMemory
from sluice.engine.execution.device_errors import guarded
from sluice.engine.execution.model_runner import ModelRunner
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import LoadPlan, load_planned, plan_load
from sluice.engine.executor import blocks_needed
from sluice.engine.text.tokenizer import Tokenizer, load_tokenizer
from sluice.worker.config import BatchingConfig
from sluice.worker.errors import ConfigError
from sluice.worker.model.folders import find_folder


def prepare_draft_model(
    batching: BatchingConfig, engine: EngineConfig, target: LoadPlan, tokenizer: Tokenizer
) -> Callable[[], ModelRunner | None]:
    """Check the draft model that the settings name, all but its weights, and return what loads it.

    Load it before the model itself, which measures the memory that is left. Without a draft model, None is loaded.

    Args:
        batching: names the draft model, and the memory of its cache.
        engine: limits of the model that it guesses for.
        target: the plan of that model.
        tokenizer: of that model.

    Raises:
        ConfigError: the folder cannot be loaded, its tokenizer is another one, or the memory holds no sequence.
    """
    if batching.draft_model is None:
        return lambda: None
    with _explained():
        folder = find_folder(batching.draft_model, setting="SLUICE_DRAFT_MODEL")
        _check_tokenizer(folder, tokenizer)
        plan = guarded(lambda: plan_load(_options(folder, engine, target.options)))
    limits = replace(plan.limits, max_model_len=min(plan.max_model_len, target.max_model_len))
    return partial(_load, _with_blocks(replace(plan, limits=limits), batching.draft_cache_mib))


def _load(plan: LoadPlan) -> ModelRunner:
    with _explained():
        return guarded(lambda: load_planned(plan))


def _options(folder: Path, engine: EngineConfig, target: ModelOptions) -> ModelOptions:
    limits = StepLimits(engine.max_num_seqs, engine.max_num_batched_tokens).of_draft_model
    return ModelOptions(
        path=folder,
        device=target.device,
        dtype=target.dtype,
        block_size=target.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        # The number of threads belongs to the process.
        num_threads=target.num_threads,
        graphs=False,
        kernels=target.kernels,
        lag=0,
        groups_layers=False,
    )


def _check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Check that a token means the same to both models.

    Raises:
        ModelFolderError: it does not.
    """
    difference = load_tokenizer(folder).first_difference(tokenizer)
    if difference is not None:
        raise ModelFolderError(
            f"{folder} has a different tokenizer from the model: {difference}. "
            f"Use a smaller model of the same family, or none."
        )


def _with_blocks(plan: LoadPlan, cache_mib: int) -> LoadPlan:
    """Give the plan as many blocks as the memory holds, but no more than the running sequences fill.

    Raises:
        ConfigError: it holds none.
    """
    options, limits = plan.options, plan.limits
    num_blocks = cache_mib * 2**20 // limits.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            [
                f"SLUICE_DRAFT_CACHE_MIB: {cache_mib} MiB cannot hold a block of {options.block_size} tokens, which "
                f"takes {limits.block_bytes / 2**20:.1f} MiB"
            ]
        )
    num_blocks = min(num_blocks, options.max_num_seqs * blocks_needed(limits.max_model_len, options.block_size))
    return replace(plan, options=replace(options, num_blocks=num_blocks), limits=replace(limits, num_blocks=num_blocks))


@contextmanager
def _explained() -> Generator[None]:
    """Name the setting that is wrong."""
    try:
        yield
    except ModelFolderError as error:
        raise ConfigError([f"SLUICE_DRAFT_MODEL: {error}"]) from error
    except NotEnoughMemory as error:
        raise ConfigError([f"SLUICE_DRAFT_CACHE_MIB: {error}"]) from error
