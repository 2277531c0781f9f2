"""Which model, by what name: a folder, a Hugging Face name, the small model that ships, or the null model.

Torch is imported only where a real model is loaded; transformers never.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from engine.config import EngineConfig
from engine.device_errors import guarded
from engine.errors import (
    EngineBroken,
    EngineError,
    ModelFolderError,
    NotEnoughMemory,
    OutOfMemory,
    QuantizationUnavailable,
)
from engine.executor import Executor, TextDecoder
from engine.llm_engine import LLMEngine
from engine.null_model import NullModel, NullModelConfig, NullTokenizer
from engine.request import Request, SamplingParams
from engine.threads import limit_spinning
from worker.chat import ChatTemplate, compile_template
from worker.config import DEFAULT_BLOCK_SIZE, ModelConfig, WorkerConfig
from worker.devices import is_several
from worker.errors import ConfigError, WorkerBroken, WorkerError
from worker.translate import Encoder

NULL = "null"
"""The name of the model that computes nothing; options follow as in `null?step_s=0.01&mean_output_tokens=50`.

With `obey_prompts=1` a prompt may ask for faults, as in `[[kill@7]]`: see `engine.chaos.faults_in`. For tests.
"""

SMALL_MODEL = Path(__file__).parent / "small_model"
_ONE_THREAD_BYTES = 64 * 2**20
_NULL_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model, loaded: what the daemon and the translator need of it."""

    name: str
    engine: LLMEngine
    executor: Executor
    encode: Encoder
    template: ChatTemplate | None

    @property
    def max_job_tokens(self) -> int:
        """Longest prompt and output together that this worker can take."""
        limits = self.executor.limits
        return min(limits.max_model_len, limits.num_blocks * limits.block_size)


def load(config: WorkerConfig) -> Served:
    """Load the model that the configuration names, onto its device.

    Raises:
        ConfigError: it cannot be loaded as asked.
        WorkerBroken: not now: memory or device are missing.
    """
    path = config.model.path
    try:
        if path is not None and path.partition("?")[0] == NULL:
            return _load_null(config, path.partition("?")[2])
        return _load_folder(config, find_folder(path))
    except ModelFolderError as error:
        raise ConfigError([f"SLUICE_MODEL: {error}"]) from error
    except QuantizationUnavailable as error:
        raise ConfigError([f"{_names_of_forms(config.model)}: {error}"]) from error
    except NotEnoughMemory as error:
        raise _lack_of_memory(config.model, error) from error
    except (EngineBroken, OutOfMemory) as error:
        # Weights without room: another process may be about to leave the device.
        raise _not_now(error) from error


def _names_of_forms(model: ModelConfig) -> str:
    """The settings that ask for weights, or keys and values, in another form than the model's own."""
    asked = {
        "SLUICE_QUANTIZATION": model.quantization != "none",
        "SLUICE_KV_CACHE_DTYPE": model.kv_cache_dtype != "auto",
    }
    return " or ".join(name for name, is_asked in asked.items() if is_asked)


def _lack_of_memory(model: ModelConfig, error: NotEnoughMemory) -> WorkerError:
    """What was stated will not fit the next time either; of what was measured, another process may give some back."""
    for name, stated in (("NUM_BLOCKS", model.num_blocks), ("MAX_MODEL_LEN", model.max_model_len)):
        if stated is not None:
            return ConfigError([f"SLUICE_{name}: {error}"])
    return _not_now(error)


def _not_now(error: EngineError) -> WorkerBroken:
    return WorkerBroken(f"the model cannot be loaded now: {error}")


def find_folder(path: str | None) -> Path:
    """The folder of a model: the one that ships, one on this machine, or a snapshot of a Hugging Face repository.

    Raises:
        ConfigError: there is none.
    """
    if path is None:
        if not (SMALL_MODEL / "config.json").is_file():
            raise ConfigError([f"SLUICE_MODEL: not given, and the small model is not at {SMALL_MODEL}"])
        return SMALL_MODEL
    folder = Path(path).expanduser()
    if not is_name(path):
        if not (folder / "config.json").is_file():
            why = "has no config.json" if folder.is_dir() else "is not a folder"
            raise ConfigError([f"SLUICE_MODEL: {path} {why}: give a model folder or a Hugging Face name (owner/name)"])
        return folder
    return _download(path)


def is_name(path: str | None) -> bool:
    """Whether a model is asked for by its Hugging Face name: owner/name, and no folder here."""
    return (
        path is not None and path.count("/") == 1 and not path.startswith((".", "~", "/")) and not Path(path).exists()
    )


def _download(name: str) -> Path:
    try:
        # Only needed for names; slow to import.
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # partial types
    except ImportError as error:
        raise ConfigError(
            [f"SLUICE_MODEL: {name} is no folder here; `pip install huggingface_hub` to download it"]
        ) from error
    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # it raises whatever its network stack raises
        raise ConfigError(
            [f"SLUICE_MODEL: {name} is no folder here and could not be downloaded ({type(error).__name__}): "
             f"check the name and the network, or give a folder"]
        ) from error  # fmt: skip


def engine_config(config: WorkerConfig) -> EngineConfig:
    """The engine's settings.

    Raises:
        ConfigError: they contradict each other.
    """
    batching = config.batching
    made = EngineConfig(
        max_num_seqs=batching.max_num_seqs,
        max_num_batched_tokens=batching.max_num_batched_tokens,
        long_prefill_token_threshold=batching.long_prefill_token_threshold,
        enable_prefix_caching=batching.enable_prefix_caching,
        policy=batching.policy,
        discipline=batching.discipline,
        batch_window_s=batching.batch_window_s,
    )
    if problems := made.problems():
        raise ConfigError(problems)
    return made


def _load_null(config: WorkerConfig, query: str) -> Served:
    if config.model.quantization != "none":
        raise ConfigError(["SLUICE_QUANTIZATION: the null model has no weights to keep in int8"])
    if config.model.kv_cache_dtype != "auto":
        raise ConfigError(["SLUICE_KV_CACHE_DTYPE: the null model has no keys and values to keep in fp8"])
    tokenizer = NullTokenizer()
    options = dict(parse_qsl(query))
    obeys_prompts = options.pop("obey_prompts", "0") == "1"
    executor: Executor = NullModel(_null_config(config.model, options))
    if obeys_prompts:
        # For tests alone.
        from engine.chaos import ChaoticExecutor

        read_prompt = partial(tokenizer.decode, skip_special_tokens=True)
        executor = ChaoticExecutor(executor, read_prompt=read_prompt)

    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        del add_special_tokens  # bytes have none
        return tokenizer.encode(text)

    return _served(NULL, executor, tokenizer, config, encode, compile_template(_NULL_TEMPLATE, {}))


def _null_config(model: ModelConfig, asked: Mapping[str, str]) -> NullModelConfig:
    kinds: dict[str, type[Any]] = {field.name: type(field.default) for field in fields(NullModelConfig)}  # int, float
    options: dict[str, Any] = {}  # whole numbers and fractions, each checked by its field's kind
    for name, text in asked.items():
        try:
            options[name] = kinds[name](text)
        except (KeyError, ValueError):
            raise ConfigError([f"SLUICE_MODEL: the null model has no option {name}={text}"]) from None
    for name in ("max_model_len", "num_blocks", "block_size"):
        if (value := getattr(model, name)) is not None:
            options[name] = value
    return NullModelConfig(**options)


def _load_folder(config: WorkerConfig, folder: Path) -> Served:
    # Before torch, which reads once how its threads shall wait.
    limit_spinning()
    # Torch takes seconds to import, and the null model does without.
    from engine.model_runner import ModelOptions, load_model_runner
    from engine.tokenizer import load_tokenizer

    _check_device(config.model.device)
    tokenizer = load_tokenizer(folder)
    model, batching = config.model, engine_config(config)
    options = ModelOptions(
        path=folder,
        device=model.device,
        dtype=model.dtype,
        quantization=model.quantization,
        kv_cache_dtype=model.kv_cache_dtype,
        block_size=model.block_size or DEFAULT_BLOCK_SIZE,
        num_blocks=model.num_blocks,
        memory_fraction=model.memory_share,
        max_model_len=model.max_model_len,
        max_num_seqs=batching.max_num_seqs,
        max_num_batched_tokens=batching.max_num_batched_tokens,
        num_threads=model.num_threads or _num_threads(folder),
        graphs=None if model.graphs else False,
    )
    executor = guarded(lambda: load_model_runner(options))
    facts = tokenizer.facts
    template = compile_template(facts.chat_template, facts.special_tokens) if facts.chat_template else None
    name = config.model.path if is_name(config.model.path) else folder.name
    served = _served(name or folder.name, executor, tokenizer, config, tokenizer.encode, template)
    _warm_up(served)
    return served


def _warm_up(served: Served) -> None:
    """Take the first steps here: kernels are compiled and memory is touched before a job waits for it."""
    sampling = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, ignore_eos=True)
    served.engine.add([Request(id="warm-up", prompt_token_ids=(0,) * 4, sampling=sampling)])
    while not served.engine.is_idle:
        served.engine.step()


def _check_device(device: str) -> None:
    """Raise ConfigError where there is no such GPU: torch would say so in a traceback, and a supervisor try again."""
    import torch

    if is_several(device):
        raise ConfigError([f"SLUICE_DEVICE: {device} stands for several GPUs, and this runs on one: name it"])
    kind, _, index = device.partition(":")
    count = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= count:
        build = "" if torch.version.cuda else "; this torch is built without CUDA"
        raise ConfigError(
            [f"SLUICE_DEVICE: there is no GPU {index or 0} ({count} found{build}): give another, or --cpu"]
        )


def _num_threads(folder: Path) -> int | None:
    """One for a small model: its products end before a second thread has woken, and where another process has that
    core the first waits for it in every one of them (50 times slower steps were measured). None: all cores."""
    size_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return 1 if size_bytes < _ONE_THREAD_BYTES else None


def _served(
    name: str,
    executor: Executor,
    decoder: TextDecoder,
    config: WorkerConfig,
    encode: Encoder,
    template: ChatTemplate | None,
) -> Served:
    engine = LLMEngine(executor, decoder, engine_config(config))
    return Served(name=name, engine=engine, executor=executor, encode=encode, template=template)
