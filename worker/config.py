"""The worker's settings: a frozen tree of dataclasses, which `load_config` builds from file, environment and flags.

Each setting is declared once, with its default, names, unit and help. Flags, environment names and `--help` are derived
from these declarations. Secrets are left out of every `repr`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from shutil import which
from typing import Any, Literal, get_type_hints

from sluice.engine.config import (
    CPU_CACHE_BYTES,
    CPU_MEMORY_FRACTION,
    CPU_STEP,
    DISCIPLINE_NAMES,
    GPU_MEMORY_FRACTION,
    GPU_STEP,
    MIXED_STEP_S,
    StepLimits,
    StepTargets,
)
from sluice.kernels.native import INSTRUCTION_SET
from sluice.protocol import limits
from sluice.protocol.checks import MAX_PORT
from sluice.protocol.errors import InvalidSetting
from sluice.protocol.queue_shares import QueueShare, read_shares
from sluice.protocol.settings import (
    CONFIG_FILE_NAME,
    GATEWAY,
    PREFIX,
    Declared,
    GivenSettings,
    Setting,
    setting,
    settings_of,
)
from sluice.protocol.webhooks import signing_keys
from sluice.worker.devices import is_device
from sluice.worker.errors import ConfigError

DEFAULT_BLOCK_SIZE = 16
OWN_ENGINE = "sluice"

CHECKPOINT_S = 1.0
"""A job that is not streamed publishes at every multiple of this time; one that is streamed, as often at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """Where the queue is."""

    url: str | None = setting(
        None,
        env="REDIS_URL",
        metavar="URL",
        secret=True,
        help="Redis or Valkey: redis, rediss, unix, redis+sentinel or redis+cluster URL. Starts one if not given.",
    )
    timeout_s: float = setting(
        5.0, env="REDIS_TIMEOUT_S", help="Treat Redis as unreachable if it does not answer for this long."
    )
    patience_s: float = setting(30.0, env="REDIS_PATIENCE_S", help="Wait this long for Redis at startup.")
    buffer_mib: int = setting(64, help="Buffer this much output while Redis is unreachable, then pause generation.")
    stream_interval_s: float = setting(
        0.02,
        help="Publish tokens at most this often; first tokens and ends are published at once. 0 publishes every step.",
    )
    unread_interval_s: float = setting(
        0.2, help="The same interval while no channel on the server is being read. 0: no difference."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each field that is wrong, with the reason."""
        plain = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")
        schemes = (*plain, "redis+cluster://", "rediss+cluster://")
        if self.url is not None and not self.url.startswith(schemes):
            scheme = self.url.split("://")[0] if "://" in self.url else "no scheme"
            yield "url", f"expected a URL that begins with {', '.join(schemes)}; got {scheme}"
        yield from _positive(self, "timeout_s", "buffer_mib")
        for name in ("stream_interval_s", "unread_interval_s"):
            if not 0 <= getattr(self, name) <= CHECKPOINT_S:
                yield name, f"expected 0 to {CHECKPOINT_S:g} seconds, got {getattr(self, name)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """The history of jobs in SQL."""

    database_url: str | None = setting(
        None,
        metavar="URL",
        secret=True,
        help="SQLAlchemy URL of the job history (SQLite or PostgreSQL). Uses a local SQLite file if not given.",
    )
    recorder: bool = setting(True, help="Run `worker record` as a child process.")
    callbacks: bool | None = setting(
        None,
        help="Run `worker callbacks` as a child process. If not given: with an embedded server, if the extra gateway "
        "is installed.",
    )
    keep_prompts: Literal["none", "hash", "full"] | None = setting(
        None, metavar="WHAT", help="Prompts in the history: none, hash or full. Keeps the queue's setting if not given."
    )
    keep_results: bool | None = setting(
        None, help="Keep results in the history. Keeps the queue's setting if not given."
    )
    otlp_traces_endpoint: str | None = setting(
        None, metavar="URL", help="Export a trace of each ended job to this URL (OTLP over HTTP). Needs the extra otel."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each field that is wrong, with the reason."""
        if self.database_url is not None and not self.database_url.startswith(("sqlite", "postgresql", "postgres")):
            yield "database_url", "expected sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
        if self.otlp_traces_endpoint is not None and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            yield "otlp_traces_endpoint", "expected http://HOST:4318/v1/traces or https://…"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """The queues to serve, and which of their jobs to take."""

    name: tuple[str, ...] = setting(
        ("default",),
        env="QUEUE",
        metavar="NAME[:WEIGHT]",
        help="A queue to serve. May be repeated: while several have jobs, each gets tokens in proportion to its weight "
        "(1 if not given). Several in the environment are separated by spaces.",
    )
    partitions: int | None = setting(
        None,
        metavar="COUNT",
        help="Number of partitions of each queue; 1 if not given. Only audit, status and top ask the workers for it.",
    )
    reserve_tokens: int = setting(
        256, help="Reserve at most this many output tokens for a job when deciding whether it fits."
    )
    on_model_change: Literal["wait", "continue", "fail"] = setting(
        "continue",
        metavar="WHAT",
        help="For a job that another model started: wait for that model, continue with this one, or fail it.",
    )
    model_wait_s: float = setting(
        10.0, help="With --on-model-change wait: set such a job aside for this long before a worker looks at it again."
    )

    @property
    def num_partitions(self) -> int:
        """The number of partitions that a worker serves."""
        return self.partitions or 1

    @property
    def shares(self) -> tuple[QueueShare, ...]:
        """The queues with their weights."""
        return read_shares(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the queues."""
        return tuple(share.name for share in self.shares)

    @property
    def title(self) -> str:
        """The queues as a phrase for people."""
        return f"queue{'s' * (len(self.name) > 1)} {', '.join(map(repr, self.names))}"

    def only(self, reader: str) -> str:
        """Return the name of the only queue; `reader` is the beginning of a sentence, such as "an audit reads".

        Raises:
            ConfigError: there are several.
        """
        if len(self.name) > 1:
            raise ConfigError([f"SLUICE_QUEUE: {reader} one queue, not {', '.join(self.names)}: give one as --queue"])
        return self.names[0]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each field that is wrong, with the reason."""
        try:
            read_shares(self.name)
        except InvalidSetting as error:
            yield "name", str(error)
        yield from _positive(self, "partitions", "reserve_tokens", "model_wait_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its device, and the memory of its KV cache."""

    path: str | None = setting(
        None,
        env="MODEL",
        metavar="PATH_OR_NAME",
        help="Model folder or Hugging Face name. Uses the small model that ships with Sluice if not given.",
    )
    device: str = setting(
        "cpu", metavar="DEVICE", help="cpu, or cuda:N for GPU N. cuda:0,2 or cuda:all starts one process per GPU."
    )
    processes: int = setting(
        1, metavar="COUNT", help="Worker processes on the CPU, which share its cores and memory. A GPU runs one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", metavar="DTYPE", help="auto (the folder's dtype), float32, bfloat16 or float16."
    )
    quantization: Literal["auto", "none", "int8", "int4"] = setting(
        "auto",
        metavar="HOW",
        help="auto: weights stay packed as a quantized model stores them. none: all weights are in the dtype. int8, "
        "int4 (on a CPU): they are rounded at load, to half or a third of the memory, at some loss of quality.",
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = setting(
        "auto",
        metavar="HOW",
        help="auto (the model's dtype), or half the memory for keys and values: fp8 on a GPU of 2022 or later, int8 on "
        "a CPU.",
    )
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        metavar="WHAT",
        help="auto: sampling options that a request omits come from generation_config.json. none: they do not.",
    )
    pooling: Literal["auto", "last", "mean"] = setting(
        "auto",
        metavar="HOW",
        help="How the states of a text's tokens become its embedding: that of the last, or their mean. auto: as "
        "sentence-transformers' files in the folder say, else last.",
    )
    tool_format: Literal["auto", "none", "hermes", "llama3", "mistral"] = setting(
        "auto",
        metavar="NAME",
        help="How the model writes calls of tools: hermes (also Qwen), llama3 or mistral. auto: as its chat template "
        "shows. none: jobs with tools are refused.",
    )
    reasoning_format: Literal["auto", "none", "think"] = setting(
        "auto",
        metavar="NAME",
        help="How the model marks its reasoning: think (<think>…</think>). auto: as its chat template shows. none: "
        "reasoning is part of the answer.",
    )
    block_size: int | None = setting(
        None, metavar="TOKENS", help=f"Token slots per block of the KV cache. {DEFAULT_BLOCK_SIZE} if not given."
    )
    num_blocks: int | None = setting(
        None, metavar="BLOCKS", help="Blocks of the KV cache. As many as fit if not given."
    )
    memory_fraction: float | None = setting(
        None,
        metavar="FRACTION",
        help="Share of the memory left by the weights that the KV cache and a GPU's largest step use. If not given: "
        f"{GPU_MEMORY_FRACTION} on a GPU; {CPU_MEMORY_FRACTION} on a CPU, and of that {CPU_CACHE_BYTES // 2**30} GiB "
        "or what the running sequences can fill.",
    )
    host_cache_mib: int | None = setting(
        None,
        help="Host memory for blocks that a GPU's KV cache lacks room for and that may be needed again. "
        "Unused by models with a sliding window. None if not given.",
    )
    max_model_len: int | None = setting(
        None, metavar="TOKENS", help="Longest prompt and output together. The model's own limit if not given."
    )
    graphs: bool = setting(True, help="On a GPU, capture steps as CUDA graphs and replay them.")
    kernels: Literal["auto", "triton", "torch"] = setting(
        "auto",
        metavar="WHICH",
        help="On a GPU: auto tries each kernel and replaces what does not work, triton replaces none, torch uses none.",
    )
    deterministic: bool = setting(
        False,
        help="Compute each token to the same bits whatever else is in a step. On a GPU it takes other kernels; on the "
        "CPU it needs bfloat16.",
    )
    engine: str = setting(
        OWN_ENGINE, metavar="NAME", help="Engine that computes tokens: sluice, or another that is installed."
    )
    engine_process: Literal["auto", "on", "off"] = setting(
        "auto",
        metavar="WHICH",
        help="Whether the engine has a process of its own, so that serving the queue takes none of its time. auto: on "
        "a GPU, and for another engine or Python.",
    )
    engine_python: str | None = setting(
        None,
        metavar="PATH",
        help="Python of the environment that runs the engine's process. The worker's own if not given.",
    )
    engine_option: tuple[str, ...] = setting(
        (),
        metavar="NAME=VALUE",
        help="An option of another engine's own, as tensor_parallel_size=2 is of vLLM. Several in the environment are "
        "separated by spaces.",
    )
    engine_untested: bool = setting(
        False, help="Run a release of another engine with which the conformance suite has not been run."
    )
    adapters: str | None = setting(
        None,
        metavar="FOLDER",
        help="Folder whose folders are adapters of the model (LoRA, as PEFT saves them). Jobs name one as their model.",
    )
    max_loaded_adapters: int = setting(
        8,
        metavar="ADAPTERS",
        help="Adapters in memory at once: others are loaded in the place of the least recently used. Jobs with more "
        "different ones than this wait for each other.",
    )
    num_threads: int | None = setting(
        None,
        metavar="THREADS",
        help="Compute threads on the CPU. If not given: one for a small model, otherwise one per core, within the "
        "quota of a container or unit.",
    )

    @property
    def has_engine_process(self) -> bool:
        """Whether the engine has a process of its own."""
        is_needed = self.device != "cpu" or self.engine != OWN_ENGINE or self.engine_python is not None
        return self.engine_process == "on" or (self.engine_process == "auto" and is_needed)

    @property
    def rounds_weights(self) -> bool:
        """Whether weights are rounded at load."""
        return self.quantization in ("int8", "int4")

    @property
    def memory_share(self) -> float:
        """The configured memory fraction, or the device's default."""
        return self.memory_fraction or (CPU_MEMORY_FRACTION if self.device == "cpu" else GPU_MEMORY_FRACTION)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each field that is wrong, with the reason."""
        if not is_device(self.device):
            yield "device", f"expected cpu, cuda:N, cuda:N,N or cuda:all, got {self.device!r}"
        if self.processes > 1 and self.device != "cpu":
            yield "processes", f"several processes are for the CPU; each GPU of {self.device} runs one: name more GPUs"
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            yield "memory_fraction", f"must be over 0 and at most 1, got {self.memory_fraction:g}"
        dtypes = ("auto", "bfloat16") if self.device == "cpu" else ("auto", "bfloat16", "float16")
        if self.rounds_weights and self.dtype not in dtypes:
            needed = "bfloat16 (or auto)" if self.device == "cpu" else "bfloat16, float16 (or auto)"
            yield "quantization", f"{self.quantization} needs {needed} as dtype, got {self.dtype}"
        if self.quantization == "int4" and self.device != "cpu":
            yield "quantization", "int4 needs a CPU; on a GPU take int8"
        if self.kv_cache_dtype == "fp8" and self.device == "cpu":
            yield "kv_cache_dtype", "fp8 needs a GPU; on a CPU take int8"
        if self.kv_cache_dtype == "int8" and self.device != "cpu":
            yield "kv_cache_dtype", "int8 needs a CPU; on a GPU take fp8"
        yield from self._engine_problems()
        yield from _positive(
            self,
            "processes",
            "max_loaded_adapters",
            "block_size",
            "num_blocks",
            "host_cache_mib",
            "max_model_len",
            "num_threads",
        )

    def _engine_problems(self) -> Iterator[tuple[str, str]]:
        if self.engine_python is not None and which(self.engine_python) is None:
            yield "engine_python", f"there is no program {self.engine_python}"
        if self.engine_python is not None and self.engine_process == "off":
            yield "engine_python", "an engine of another Python needs a process of its own: leave out engine_process"
        if self.engine_option and self.engine == OWN_ENGINE:
            yield "engine_option", "the engine sluice has no options of its own: each is a setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """How the engine batches."""

    max_num_seqs: int | None = setting(
        None,
        metavar="SEQUENCES",
        help="Maximum number of sequences running at once. "
        f"{GPU_STEP.max_num_seqs} on a GPU, {CPU_STEP.max_num_seqs} on a CPU if not given.",
    )
    max_num_batched_tokens: int | None = setting(
        None,
        help="Maximum number of tokens computed in one step, prefill and decode together. "
        f"{GPU_STEP.max_num_batched_tokens} on a GPU, {CPU_STEP.max_num_batched_tokens} on a CPU if not given.",
    )
    mixed_step_s: float = setting(
        MIXED_STEP_S,
        help="Add prompts to a step with decodes until it takes this long, or 1.5 times its decodes alone. "
        "0 sets no limit. Not used with a target.",
    )
    ttft_target_s: float | None = setting(
        None, help="Target for the time to the first token: a step with decodes takes at most half as long."
    )
    tpot_target_s: float | None = setting(
        None, help="Target for the time per further token: a step with decodes takes at most this long."
    )
    long_prefill_token_threshold: int = setting(
        0,
        metavar="TOKENS",
        help="Maximum number of prompt tokens of one sequence in a step while others run. 0 sets no limit.",
    )
    enable_prefix_caching: bool = setting(True, help="Share KV blocks between prompts with a common prefix.")
    policy: str = setting(
        "priority",
        metavar="NAME",
        help="Order in the engine: priority (a higher class takes places and blocks of lower ones) or fcfs.",
    )
    admission: str = setting(
        "watermark",
        metavar="NAME",
        help="What a job reserves of the KV cache when it starts: watermark (its known tokens) or guaranteed (its "
        "longest output).",
    )
    discipline: str = setting(
        "continuous",
        metavar="NAME",
        help=f"Batching discipline: {', '.join(DISCIPLINE_NAMES)}. All but the first are for comparison.",
    )
    batch_window_s: float = setting(
        0.1, help="With --discipline dynamic: start a partial batch this long after its first sequence arrived."
    )
    speculation: Literal["auto", "off", "suffix"] = setting(
        "auto",
        metavar="MODE",
        help="Guess tokens to be verified in one step: suffix (from what followed the same tokens in the job's text or "
        "recent outputs of its tenant) or off. The output is the same. auto is suffix on a CPU, off on a GPU.",
    )
    draft_model: str | None = setting(
        None,
        metavar="PATH_OR_NAME",
        help="With speculation: guess with this smaller model of the same tokenizer where earlier text gives no guess.",
    )
    draft_cache_mib: int = setting(
        256, help="Memory for the KV cache of the draft model. Jobs that do not fit get no guesses from it."
    )

    @property
    def step_targets(self) -> StepTargets | None:
        """How long a step may take; None without a limit."""
        if not (self.mixed_step_s or self.ttft_target_s or self.tpot_target_s):
            return None
        return StepTargets(
            mixed_step_s=self.mixed_step_s or MIXED_STEP_S, ttft_s=self.ttft_target_s, tpot_s=self.tpot_target_s
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each field that is wrong, with the reason."""
        if self.mixed_step_s < 0:
            yield "mixed_step_s", f"must be 0 or more, got {self.mixed_step_s:g}"
        if self.draft_model is not None and self.speculation == "off":
            yield "draft_model", "speculation is off: drop one of the two settings"
        yield from _positive(self, "ttft_target_s", "tpot_target_s", "draft_cache_mib")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatConfig:
    """Heartbeats and the watchdog."""

    every_s: float = setting(limits.BEAT_EVERY_S, env="BEAT_EVERY_S", help="Send a heartbeat this often.")
    life_s: float = setting(
        limits.HEARTBEAT_LIFETIME_S,
        env="BEAT_LIFE_S",
        help="Consider a worker dead after this long without a heartbeat, and take over its jobs.",
    )
    step_deadline_s: float = setting(
        30.0, help="Consider a step hung if it takes longer than this and than five times the slowest step so far."
    )
    load_deadline_s: float = setting(
        3600.0, help="Consider the process of an engine hung if it loads the model for longer than this."
    )

    @property
    def answer_within_s(self) -> float:
        """Seconds until an unanswered heartbeat is sent again on a new connection: half its lifetime, at least 1."""
        return max(1.0, self.life_s / 2)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each field that is wrong, with the reason."""
        yield from _positive(self, "every_s", "life_s", "step_deadline_s", "load_deadline_s")
        if self.every_s * 3 > self.life_s:
            yield "every_s", f"must be at most a third of BEAT_LIFE_S ({self.life_s:g}), got {self.every_s:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    """Graceful shutdown on SIGTERM."""

    mode: Literal["finish", "hand-over"] = setting(
        "finish",
        env="DRAIN",
        metavar="MODE",
        help="On SIGTERM, finish running jobs within the timeout, or return them at their next token.",
    )
    timeout_s: float = setting(
        30.0, env="DRAIN_TIMEOUT_S", help="Hand over jobs that still run this long after SIGTERM."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each field that is wrong, with the reason."""
        if self.timeout_s < 0:
            yield "timeout_s", f"must be 0 or more, got {self.timeout_s:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """The HTTP server of /metrics, /healthz and /readyz."""

    enabled: bool = setting(True, env="METRICS", help="Serve /metrics, /healthz and /readyz.")
    host: str = setting("127.0.0.1", env="METRICS_HOST", metavar="ADDRESS", help="Address to serve metrics on.")
    port: int = setting(
        9400,
        env="METRICS_PORT",
        metavar="PORT",
        help="Port to serve metrics on. Uses the next free one if it is taken.",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each field that is wrong, with the reason."""
        if not 0 <= self.port <= MAX_PORT:
            yield "port", f"must be 0 (any) to {MAX_PORT}, got {self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logging."""

    name: str | None = setting(
        None,
        metavar="NAME",
        help="Name of this worker in its log lines and in `worker status`. A fleet names its processes.",
    )
    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", env="LOG_LEVEL", metavar="LEVEL", help="debug, info, warning or error."
    )
    format: Literal["auto", "plain", "json"] = setting(
        "auto", env="LOG_FORMAT", metavar="FORMAT", help="plain, json, or auto: plain on a terminal, JSON elsewhere."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbacksConfig:
    """Webhooks, exports and retention, run by rq."""

    redis_url: str | None = setting(
        None,
        env="CALLBACKS_REDIS_URL",
        metavar="URL",
        secret=True,
        help="Redis for rq. Uses the queue's Redis if not given.",
    )
    secret: str | None = setting(
        None,
        env="CALLBACKS_SECRET",
        metavar="SECRET",
        secret=True,
        help="Keys from which tenants' webhook secrets derive, separated by spaces. Without one, webhooks are refused.",
    )
    networks: str | None = setting(
        None,
        env="CALLBACKS_NETWORKS",
        metavar="NETWORKS",
        help="Private networks that webhooks may reach, separated by commas.",
    )
    senders: int = setting(
        3,
        env="CALLBACKS_SENDERS",
        metavar="PROCESSES",
        help="Processes that send webhooks; one tenant uses at most all but one.",
    )
    export_folder: str | None = setting(
        None, metavar="FOLDER", help="Write each completed batch here as JSON lines. Writes none if not given."
    )
    files_url: str | None = setting(
        None,
        metavar="URL",
        secret=True,
        help="Where the HTTP gateway keeps files: file:///FOLDER or s3://BUCKET. Uses the state folder if not given.",
    )
    prompt_retention_days: float | None = setting(
        None, help="Delete prompts from the history after this many days. Keeps them with their rows if not given."
    )
    retention_days: float = setting(
        365.0, help="Delete history rows of jobs that ended this many days ago. 0 keeps all rows."
    )
    file_retention_days: float = setting(
        30.0, help="Delete the HTTP gateway's files after this many days, unless an open batch reads them. 0 keeps all."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each field that is wrong, with the reason."""
        yield from _positive(self, "prompt_retention_days", "senders")
        for name in ("retention_days", "file_retention_days"):
            if getattr(self, name) < 0:
                yield name, f"must be 0 (keep all) or more, got {getattr(self, name):g}"
        if self.secret is not None:
            try:
                signing_keys(self.secret)
            except ValueError as error:
                yield "secret", str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The whole configuration."""

    redis: RedisConfig = field(default_factory=RedisConfig)
    history: HistoryConfig = field(default_factory=HistoryConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    beat: BeatConfig = field(default_factory=BeatConfig)
    drain: DrainConfig = field(default_factory=DrainConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)

    @property
    def step_limits(self) -> StepLimits:
        """The configured limits of a step; the device's defaults for what is not given."""
        batching = self.batching
        return StepLimits.of(
            self.model.device,
            max_num_seqs=batching.max_num_seqs,
            max_num_batched_tokens=batching.max_num_batched_tokens,
        )


def _positive(section: object, *names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        value = getattr(section, name)
        if value is not None and value <= 0:
            yield name, f"must be over 0, got {value:g}"


# ---------------------------------------------------------------- reading

READ_ELSEWHERE = frozenset({CONFIG_FILE_NAME, "SLUICE_STATE_DIR", "SLUICE_API_KEY", INSTRUCTION_SET})
"""Names with the prefix that others read, such as the gateway's clients; they are not errors here."""


_SECTIONS: dict[str, Any] = get_type_hints(WorkerConfig)  # Any: dataclasses without a common base

SETTINGS: tuple[Setting, ...] = tuple(leaf for name, kind in _SECTIONS.items() for leaf in settings_of(name, kind))

FLEET_SECTION, TURNS_SECTION = "workers", "turns"
"""The sections of the file that `worker fleet` reads."""

_DECLARED = Declared(
    settings=SETTINGS,
    is_ours=lambda name: name not in READ_ELSEWHERE and not name.startswith(PREFIX + GATEWAY),
    hint="`worker start --help` lists all",
    other_sections=("gateway", FLEET_SECTION, TURNS_SECTION),
)


def load_config(
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    named: Callable[[Setting], str] = attrgetter("flag"),
) -> WorkerConfig:
    """Build the configuration. `flags` maps `section.name` to a value; problems name such a setting as `named` does.

    Raises:
        ConfigError: settings are wrong; each is named as it was given.
    """
    given = _DECLARED.read(environ, file=file, flags=flags, named=named)
    config = WorkerConfig(**{section: kind(**given.of(section)) for section, kind in _SECTIONS.items()})
    if problems := [*given.problems, *_problems(config, given)]:
        raise ConfigError(problems)
    return config


def _problems(config: WorkerConfig, given: GivenSettings) -> Iterator[str]:
    names = {leaf.key: leaf.env_name for leaf in SETTINGS} | given.names
    for section in [name for name in _SECTIONS if name not in given.unread]:
        part = getattr(config, section)
        for name, problem in part.problems() if hasattr(part, "problems") else ():
            yield f"{names[f'{section}.{name}']}: {problem}"
