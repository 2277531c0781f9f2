"""Prepare and load a model: a folder, a Hugging Face name, the shipped small model, or the null model.

Preparing checks all but the weights. Imports torch only to load a real model, and never transformers.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl

from sluice.engine.capabilities import CLASSIFY, EMBED, Capabilities
from sluice.engine.config import CPU_CACHE_BYTES, EngineConfig
from sluice.engine.errors import (
    AdapterError,
    DeterminismUnavailable,
    EngineBroken,
    EngineError,
    KernelsUnavailable,
    ModelFolderError,
    NotEnoughMemory,
    OutOfMemory,
    QuantizationUnavailable,
)
from sluice.engine.execution.device_errors import guarded
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.threads import limit_spinning
from sluice.engine.executor import Executor
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import Request, Sampling
from sluice.kernels import chain
from sluice.worker.config import DEFAULT_BLOCK_SIZE, OWN_ENGINE, ModelConfig, WorkerConfig
from sluice.worker.devices import is_several
from sluice.worker.errors import ConfigError, WorkerBroken, WorkerError
from sluice.worker.model.chat_template import compile_template
from sluice.worker.model.folders import NULL, find_folder, is_null, name_of
from sluice.worker.model.loaded_model import EngineFacts, LocalModel, ModelText, PreparedModel
from sluice.worker.model.offered import WEIGHTS, own_capabilities
from sluice.worker.model.output_formats import output_format_of

if TYPE_CHECKING:
    from sluice.engine.execution.start.model_loading import LoadPlan

_ONE_THREAD_BYTES = 64 * 2**20
_NULL_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def load(config: WorkerConfig) -> LocalModel:
    """Load the configured model onto its device, with our own engine.

    Raises:
        ConfigError: the settings do not allow it, or name another engine.
        WorkerBroken: memory or the device is unavailable now.
    """
    if config.model.engine != OWN_ENGINE:
        raise ConfigError([f"SLUICE_ENGINE: only `worker start` runs the engine {config.model.engine}"])
    return prepare(config).load()


def prepare(config: WorkerConfig) -> PreparedModel[LocalModel]:
    """Check the settings of the model, its files and its device: all that can be known without its weights.

    The engine `sluice` of the registry.

    Raises:
        ConfigError: the settings do not allow it.
        WorkerBroken: the device is unavailable now.
    """
    with explained(config.model):
        is_folder = not is_null(config.model)
        prepared = _prepare_folder(config, find_folder(config.model.path)) if is_folder else _prepare_null(config)
    return replace(prepared, load=explained(config.model)(prepared.load))


@contextmanager
def explained(model: ModelConfig) -> Generator[None]:
    """Translate the engine's errors, and name the setting that is wrong."""
    try:
        yield
    except ModelFolderError as error:
        raise ConfigError([f"SLUICE_MODEL: {error}"]) from error
    except AdapterError as error:
        raise ConfigError([f"SLUICE_ADAPTERS: {error}"]) from error
    except QuantizationUnavailable as error:
        raise ConfigError([f"{_names_of_forms(model)}: {error}"]) from error
    except DeterminismUnavailable as error:
        raise ConfigError([f"SLUICE_DETERMINISTIC: {error}"]) from error
    except KernelsUnavailable as error:
        name = "SLUICE_DETERMINISTIC" if model.deterministic else "SLUICE_KERNELS"
        raise ConfigError([f"{name}: {error}"]) from error
    except NotEnoughMemory as error:
        raise _lack_of_memory(model, error) from error
    except (EngineBroken, OutOfMemory) as error:
        # Not a setting: another process may free the device's memory soon.
        raise _not_now(error) from error


def _names_of_forms(model: ModelConfig) -> str:
    """Name the settings that request other formats for weights, or for keys and values, than the model's own."""
    forms = {
        "SLUICE_QUANTIZATION": model.rounds_weights,
        "SLUICE_KV_CACHE_DTYPE": model.kv_cache_dtype != "auto",
    }
    return " or ".join(name for name, is_asked in forms.items() if is_asked)


def _lack_of_memory(model: ModelConfig, error: NotEnoughMemory) -> WorkerError:
    """Blame a configured size, which will never fit; without one, another process may free memory."""
    for name, stated in (("NUM_BLOCKS", model.num_blocks), ("MAX_MODEL_LEN", model.max_model_len)):
        if stated is not None:
            return ConfigError([f"SLUICE_{name}: {error}"])
    return _not_now(error)


def _not_now(error: EngineError) -> WorkerBroken:
    return WorkerBroken(f"the model cannot be loaded now: {error}")


def engine_config(config: WorkerConfig, *, has_speculation: bool = True) -> EngineConfig:
    """Build the engine's configuration; `has_speculation` if its steps can verify drafts.

    Raises:
        ConfigError: settings contradict each other.
    """
    batching, limits = config.batching, config.step_limits
    made = EngineConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        step_targets=batching.step_targets,
        long_prefill_token_threshold=batching.long_prefill_token_threshold,
        enable_prefix_caching=batching.enable_prefix_caching,
        policy=batching.policy,
        admission=batching.admission,
        discipline=batching.discipline,
        batch_window_s=batching.batch_window_s,
        speculation=_speculation(config) if has_speculation else "off",
    )
    if problems := made.problems():
        raise ConfigError(problems)
    return made


def _speculation(config: WorkerConfig) -> Literal["off", "suffix"]:
    method, discipline = config.batching.speculation, config.batching.discipline
    if method != "auto":
        return method
    may_pay = config.model.device == "cpu" and not is_null(config.model) and discipline == "continuous"
    return "suffix" if may_pay or config.batching.draft_model is not None else "off"


def _facts_of(executor: Executor, capabilities: Capabilities) -> EngineFacts:
    return EngineFacts(
        limits=executor.limits,
        capabilities=capabilities,
        fingerprint=executor.fingerprint,
        kernels=chain.description(),
        stepped_down=chain.stepped_down(),
    )


def _torch_facts(executor: Executor, plan: "LoadPlan", text: ModelText) -> EngineFacts:
    from sluice.engine.models.families import known_families  # imports torch

    refused = {EMBED: text.embed} if isinstance(text.embed, str) else dict[str, str]()
    if not executor.limits.num_classes:
        refused[CLASSIFY] = "the model has no classification head"
    capabilities = own_capabilities(known_families(), WEIGHTS, is_bitwise=plan.is_bitwise, refused=refused)
    return _facts_of(executor, capabilities)


def _prepare_null(config: WorkerConfig) -> PreparedModel[LocalModel]:
    if config.model.rounds_weights:
        raise ConfigError([f"SLUICE_QUANTIZATION: the null model has no weights in {config.model.quantization}"])
    if config.model.kv_cache_dtype != "auto":
        raise ConfigError(["SLUICE_KV_CACHE_DTYPE: the null model has no keys and values to keep in 8 bits"])
    if config.model.adapters is not None:
        raise ConfigError(["SLUICE_ADAPTERS: the null model has no weights that an adapter could change"])
    if config.batching.draft_model is not None:
        raise ConfigError(["SLUICE_DRAFT_MODEL: the null model has no tokenizer that another model could share"])
    options = dict(parse_qsl((config.model.path or "").partition("?")[2]))
    obeys_prompts = options.pop("obey_prompts", "0") == "1"
    null, batching, tokenizer = NullModel(_null_config(config.model, options)), engine_config(config), NullTokenizer()
    template = compile_template(_NULL_TEMPLATE, {})
    text = ModelText(tokenizer=tokenizer, template=template, output_format=output_format_of(template, config.model))

    def load_null() -> LocalModel:
        executor: Executor = null
        if obeys_prompts:
            # For tests only.
            from sluice.engine.testing.fault_injection import ChaoticExecutor

            executor = ChaoticExecutor(null, read_prompt=partial(tokenizer.decode, skip_special_tokens=True))
        engine = LLMEngine(executor, tokenizer, batching)
        facts = _facts_of(executor, own_capabilities([NULL], (), is_bitwise=True))
        return LocalModel(name=NULL, text=text, engine=engine, executor=executor, facts=facts)

    return PreparedModel(
        name=NULL,
        description="the null model, which computes nothing",
        text=text,
        max_job_tokens=null.limits.longest_request(batching.max_num_batched_tokens),
        load=load_null,
    )


def _null_config(model: ModelConfig, given: Mapping[str, str]) -> NullModelConfig:
    kinds: dict[str, type[Any]] = {field.name: type(field.default) for field in fields(NullModelConfig)}  # int, float
    options: dict[str, Any] = {}  # int or float, as the field's default
    for name, text in given.items():
        try:
            options[name] = kinds[name](text)
        except (KeyError, ValueError):
            raise ConfigError([f"SLUICE_MODEL: the null model has no option {name}={text}"]) from None
    for name in ("max_model_len", "num_blocks", "block_size"):
        if (value := getattr(model, name)) is not None:
            options[name] = value
    return NullModelConfig(**options)


def _prepare_folder(config: WorkerConfig, folder: Path) -> PreparedModel[LocalModel]:
    # Before the import of torch, which reads this setting once.
    limit_spinning()
    # Imported here because torch takes seconds to import and the null model does not need it.
    from sluice.engine.execution.start.model_loading import load_planned, plan_load
    from sluice.engine.execution.start.needs import needs_of
    from sluice.engine.models.load import generates
    from sluice.worker.model.draft_model import prepare_draft_model
    from sluice.worker.model.folder_text import read_text

    check_device(config.model.device)
    options = _model_options(config, folder)
    plan = guarded(lambda: plan_load(options))
    read = read_text(config.model, plan.folder, vocab_size=plan.limits.vocab_size)
    text = replace(read.text, generates=generates(plan.config, plan.folder.weights))
    plan = replace(plan, options=replace(options, end_token_ids=read.end_token_ids))
    batching = engine_config(config)
    load_draft_model = prepare_draft_model(config.batching, batching, plan, read.tokenizer)
    name = name_of(config.model.path, folder)

    def load_weights() -> LocalModel:
        # First: the memory that is left is for the model's own cache.
        draft_model = load_draft_model()
        executor = guarded(lambda: load_planned(plan))
        engine = LLMEngine(executor, read.tokenizer, batching, draft_model=draft_model)
        warm_up(engine)
        return LocalModel(
            name=name, text=text, engine=engine, executor=executor, facts=_torch_facts(executor, plan, text)
        )

    return PreparedModel(
        name=name,
        description=", ".join(
            filter(None, (read.description, plan.form.says(plan.folder.weights), plan.catalogue.description))
        ),
        text=text,
        max_job_tokens=plan.limits.longest_request(batching.max_num_batched_tokens)
        if options.num_blocks
        else plan.max_model_len,
        needs=lambda: needs_of(plan),
        load=load_weights,
    )


def _model_options(config: WorkerConfig, folder: Path) -> ModelOptions:
    model, batching = config.model, engine_config(config)
    return ModelOptions(
        path=folder,
        device=model.device,
        dtype=model.dtype,
        quantization=model.quantization,
        kv_cache_dtype=model.kv_cache_dtype,
        block_size=model.block_size or DEFAULT_BLOCK_SIZE,
        num_blocks=model.num_blocks,
        host_cache_bytes=(model.host_cache_mib or 0) * 2**20,
        memory_fraction=model.memory_share,
        cpu_cache_bytes=CPU_CACHE_BYTES if model.memory_fraction is None else None,
        max_model_len=model.max_model_len,
        max_num_seqs=batching.max_num_seqs,
        max_num_batched_tokens=batching.max_num_batched_tokens,
        speculates=batching.speculation != "off",
        num_threads=model.num_threads or _num_threads(folder),
        graphs=None if model.graphs else False,
        kernels=model.kernels,
        is_deterministic=model.deterministic,
        adapters=None if model.adapters is None else Path(model.adapters),
        max_loaded_adapters=model.max_loaded_adapters,
        warms_up=True,
    )


def warm_up(engine: LLMEngine) -> None:
    """Run a few steps, so that kernels are compiled and memory is touched before the first job."""
    sampling = Sampling(max_tokens=2, temperature=1.0, top_p=0.9, ignore_eos=True)
    engine.add([Request(id="warm-up", prompt_token_ids=(0,) * 4, sampling=sampling)])
    while not engine.is_idle:
        engine.advance()


def check_device(device: str) -> None:
    """Check that the device exists.

    Raises:
        ConfigError: there is no such GPU, or the name stands for several.
    """
    import torch

    if is_several(device):
        raise ConfigError([f"SLUICE_DEVICE: {device} stands for several GPUs, and this command runs on one: name it"])
    kind, _, index = device.partition(":")
    count = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= count:
        build = "" if torch.version.cuda else "; this torch is built without CUDA"
        raise ConfigError(
            [f"SLUICE_DEVICE: there is no GPU {index or 0} ({count} found{build}): give another, or --cpu"]
        )


def _num_threads(folder: Path) -> int | None:
    """Return 1 for a small model, else None for all cores.

    A small model's matrix products end before a second thread has woken. If another process uses that thread's core,
    every product waits for it: steps were measured to be 50 times slower.
    """
    size_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return 1 if size_bytes < _ONE_THREAD_BYTES else None
