"""The worker's settings: one frozen tree, built once from defaults, a TOML file, the environment and flags.

A later source of these four wins.

Each setting is declared once, with its name, unit and meaning; flags, environment names and `--help` come from there.
Nothing else in the worker reads the environment. Secrets never appear in a `repr`.
"""

import dataclasses
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from engine.config import CPU_MEMORY_FRACTION, DISCIPLINE_NAMES, GPU_MEMORY_FRACTION
from producer.contract import limits
from worker.devices import is_device
from worker.errors import ConfigError

T = TypeVar("T")

PREFIX = "SLUICE_"
CONFIG_FILE_NAME = "SLUICE_CONFIG"
"""Environment name of the TOML file's path."""

DEFAULT_BLOCK_SIZE = 16

READ_ELSEWHERE = frozenset({CONFIG_FILE_NAME, "SLUICE_STATE_DIR", "SLUICE_TENANT"})
"""Names with our prefix that other parts read: not an error here."""


def setting(
    default: T,
    *,
    env: str,
    metavar: str,
    help: str,
    secret: bool = False,
) -> T:
    """A field of the tree: `env` names it in the environment (SLUICE_<env>) and as a flag (--<env>)."""
    return field(default=default, repr=not secret, metadata={"env": env, "metavar": metavar, "help": help})


MAX_STREAM_INTERVAL_S = 1.0
"""More often, a job that nobody streams is written down too (`channel.CHECKPOINT_S`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """Where the queue is."""

    url: str | None = setting(
        None, env="REDIS_URL", metavar="URL", secret=True,
        help="Redis or Valkey: redis, rediss, unix, redis+sentinel or redis+cluster URL. Starts one if not given.",
    )  # fmt: skip
    timeout_s: float = setting(
        5.0, env="REDIS_TIMEOUT_S", metavar="SECONDS",
        help="Take a Redis that does not answer for this long as away.",
    )  # fmt: skip
    patience_s: float = setting(
        30.0, env="REDIS_PATIENCE_S", metavar="SECONDS", help="At start, wait this long for Redis before giving up."
    )
    buffer_mib: int = setting(
        64, env="BUFFER_MIB", metavar="MIB",
        help="Hold back this much output while Redis is away, then stand still.",
    )  # fmt: skip
    stream_interval_s: float = setting(
        0.02, env="STREAM_INTERVAL_S", metavar="SECONDS",
        help="Let tokens travel at most so often; first tokens and ends do at once. 0: every step's.",
    )  # fmt: skip

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it)."""
        plain = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")
        schemes = (*plain, "redis+cluster://", "rediss+cluster://")
        if self.url is not None and not self.url.startswith(schemes):
            scheme = self.url.split("://")[0] if "://" in self.url else "no scheme"
            yield "url", f"expected a URL that begins with {', '.join(schemes)}; got {scheme}"
        yield from _positive(self, "timeout_s", "buffer_mib")
        if not 0 <= self.stream_interval_s <= MAX_STREAM_INTERVAL_S:
            yield "stream_interval_s", f"expected 0 to {MAX_STREAM_INTERVAL_S:g} seconds, got {self.stream_interval_s}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """The rows that people query."""

    database_url: str | None = setting(
        None, env="DATABASE_URL", metavar="URL", secret=True,
        help="SQLAlchemy URL of the job history (SQLite or PostgreSQL). A SQLite file beside the queue if not given.",
    )  # fmt: skip
    recorder: bool = setting(
        True, env="RECORDER", metavar="", help="Run `worker record` beside the worker, and stop it afterwards."
    )
    keep_prompts: Literal["none", "hash", "full"] | None = setting(
        None, env="KEEP_PROMPTS", metavar="WHAT",
        help="Prompts in the history: none, hash or full. Leaves the queue as it is if not given.",
    )  # fmt: skip
    keep_results: bool | None = setting(
        None, env="KEEP_RESULTS", metavar="",
        help="Keep results in the history. Leaves the queue as it is if not given.",
    )  # fmt: skip

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it)."""
        if self.database_url is not None and not self.database_url.startswith(("sqlite", "postgresql", "postgres")):
            yield "database_url", "expected sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """Which queue, and what it may hold for this worker."""

    name: str = setting("default", env="QUEUE", metavar="NAME", help="Queue to serve.")
    partitions: int = setting(1, env="PARTITIONS", metavar="COUNT", help="Partitions of the queue; all are served.")
    reserve_tokens: int = setting(
        256, env="RESERVE_TOKENS", metavar="TOKENS",
        help="Count at most this much output of a job when deciding whether it fits.",
    )  # fmt: skip
    on_model_change: Literal["wait", "continue", "fail"] = setting(
        "continue", env="ON_MODEL_CHANGE", metavar="WHAT",
        help="A job that another model began: wait for that model, continue with this one, or fail the job.",
    )  # fmt: skip
    model_wait_s: float = setting(
        10.0, env="MODEL_WAIT_S", metavar="SECONDS",
        help="With --on-model-change wait: keep such a job for this long before others may take it.",
    )  # fmt: skip

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it)."""
        if not 0 < len(self.name) <= limits.MAX_QUEUE_NAME_CHARS or any(c in self.name for c in "{}: \n"):
            yield "name", f"expected 1 to {limits.MAX_QUEUE_NAME_CHARS} characters without braces, colons or spaces"
        yield from _positive(self, "partitions", "reserve_tokens", "model_wait_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, where, and how much memory its cache gets."""

    path: str | None = setting(
        None, env="MODEL", metavar="PATH_OR_NAME",
        help="Model folder or Hugging Face name. The small model that ships with Sluice if not given.",
    )  # fmt: skip
    device: str = setting(
        "cpu", env="DEVICE", metavar="DEVICE",
        help="cpu, or cuda:N for GPU N; cuda:0,2 or cuda:all starts one process for each.",
    )  # fmt: skip
    processes: int = setting(
        1, env="PROCESSES", metavar="COUNT",
        help="Worker processes on the CPU, which share its cores and memory. A GPU has one.",
    )  # fmt: skip
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", env="DTYPE", metavar="DTYPE", help="auto (what the folder says), float32, bfloat16 or float16."
    )
    quantization: Literal["none", "int8"] = setting(
        "none", env="QUANTIZATION", metavar="HOW",
        help="none, or int8: weights in half the memory and read as much faster, at some loss of quality.",
    )  # fmt: skip
    kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "auto", env="KV_CACHE_DTYPE", metavar="HOW",
        help="auto (the model's dtype), or fp8: keys and values in half the memory, on a GPU of 2022 or later.",
    )  # fmt: skip
    block_size: int | None = setting(
        None, env="BLOCK_SIZE", metavar="TOKENS",
        help=f"Token slots in a block of the KV cache. {DEFAULT_BLOCK_SIZE} if not given.",
    )  # fmt: skip
    num_blocks: int | None = setting(
        None, env="NUM_BLOCKS", metavar="BLOCKS", help="Blocks of the KV cache. As many as fit if not given."
    )
    memory_fraction: float | None = setting(
        None,
        env="MEMORY_FRACTION",
        metavar="FRACTION",
        help="Share of the memory that the weights leave free, for the KV cache and, measured, a GPU's largest step. "
        f"{GPU_MEMORY_FRACTION} on a GPU, {CPU_MEMORY_FRACTION} on a CPU if not given.",
    )
    max_model_len: int | None = setting(
        None, env="MAX_MODEL_LEN", metavar="TOKENS",
        help="Longest prompt and output together. What the model was made for if not given.",
    )  # fmt: skip
    graphs: bool = setting(
        True, env="GRAPHS", metavar="", help="On a GPU, record steps and replay them: less time between kernels."
    )
    num_threads: int | None = setting(
        None, env="NUM_THREADS", metavar="THREADS",
        help="Threads that compute on the CPU. One for a small model, else one per core, if not given.",
    )  # fmt: skip

    @property
    def memory_share(self) -> float:
        """The memory fraction that is stated, or else the device's."""
        return self.memory_fraction or (CPU_MEMORY_FRACTION if self.device == "cpu" else GPU_MEMORY_FRACTION)

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it)."""
        if not is_device(self.device):
            yield "device", f"expected cpu, cuda:N, cuda:N,N or cuda:all, got {self.device!r}"
        if self.processes > 1 and self.device != "cpu":
            yield "processes", f"several are for the CPU; one runs on each GPU of {self.device}: name more of them"
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            yield "memory_fraction", f"must be over 0 and at most 1, got {self.memory_fraction:g}"
        int8_dtypes = ("auto", "bfloat16") if self.device == "cpu" else ("auto", "bfloat16", "float16")
        if self.quantization == "int8" and self.dtype not in int8_dtypes:
            needed = "bfloat16 (or auto)" if self.device == "cpu" else "bfloat16, float16 (or auto)"
            yield "quantization", f"int8 needs {needed} as dtype, got {self.dtype}"
        if self.kv_cache_dtype == "fp8" and self.device == "cpu":
            yield "kv_cache_dtype", "fp8 is for a GPU; a CPU would be slower by it"
        yield from _positive(self, "processes", "block_size", "num_blocks", "max_model_len", "num_threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """How the engine batches."""

    max_num_seqs: int = setting(64, env="MAX_NUM_SEQS", metavar="SEQUENCES", help="Most sequences running at once.")
    max_num_batched_tokens: int = setting(
        2048, env="MAX_NUM_BATCHED_TOKENS", metavar="TOKENS",
        help="Most tokens computed in one step, prompts and decodes together.",
    )  # fmt: skip
    long_prefill_token_threshold: int = setting(
        0, env="LONG_PREFILL_TOKEN_THRESHOLD", metavar="TOKENS",
        help="Most prompt tokens of one sequence in a step while others run; 0 is no limit but the budget.",
    )  # fmt: skip
    enable_prefix_caching: bool = setting(
        True, env="ENABLE_PREFIX_CACHING", metavar="", help="Reuse the cache of prompts that begin alike."
    )
    policy: str = setting("fcfs", env="POLICY", metavar="NAME", help="Who goes first in the engine: fcfs or priority.")
    discipline: str = setting(
        "continuous", env="DISCIPLINE", metavar="NAME",
        help=f"How the engine batches: {', '.join(DISCIPLINE_NAMES)}. Others than the first are there to be compared.",
    )  # fmt: skip
    batch_window_s: float = setting(
        0.1, env="BATCH_WINDOW_S", metavar="SECONDS",
        help="With --discipline dynamic: begin a batch that is not full this long after its first sequence came.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatConfig:
    """How a worker shows that it lives."""

    every_s: float = setting(
        limits.BEAT_EVERY_S, env="BEAT_EVERY_S", metavar="SECONDS", help="Show that the worker lives this often."
    )
    life_s: float = setting(
        limits.LIFE_S, env="BEAT_LIFE_S", metavar="SECONDS",
        help="A worker silent for this long is dead, and its jobs are taken over.",
    )  # fmt: skip
    step_deadline_s: float = setting(
        30.0, env="STEP_DEADLINE_S", metavar="SECONDS",
        help="A step that takes longer than this (and than five times the slowest before) counts as hung.",
    )  # fmt: skip

    @property
    def answer_within_s(self) -> float:
        """A beat not answered by then is sent again on a new connection, while the life still lasts."""
        return max(1.0, self.life_s / 2)

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it)."""
        yield from _positive(self, "every_s", "life_s", "step_deadline_s")
        if self.every_s * 3 > self.life_s:
            yield "every_s", f"must be at most a third of BEAT_LIFE_S ({self.life_s:g}), got {self.every_s:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig:
    """What SIGTERM does."""

    mode: Literal["finish", "hand-over"] = setting(
        "finish", env="DRAIN", metavar="MODE",
        help="On SIGTERM, finish what runs within the timeout, or hand it over at its next token.",
    )  # fmt: skip
    timeout_s: float = setting(
        30.0, env="DRAIN_TIMEOUT_S", metavar="SECONDS", help="Hand over what still runs this long after SIGTERM."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it)."""
        if self.timeout_s < 0:
            yield "timeout_s", f"must be 0 or more, got {self.timeout_s:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where /metrics, /healthz and /readyz are served."""

    enabled: bool = setting(True, env="METRICS", metavar="", help="Serve /metrics, /healthz and /readyz.")
    host: str = setting("127.0.0.1", env="METRICS_HOST", metavar="ADDRESS", help="Address to serve metrics on.")
    port: int = setting(
        9400, env="METRICS_PORT", metavar="PORT", help="Port to serve metrics on; the next free one if it is taken."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it)."""
        if not 0 <= self.port <= 65535:
            yield "port", f"must be 0 (any) to 65535, got {self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """How the worker speaks."""

    name: str | None = setting(
        None, env="NAME", metavar="NAME",
        help="Name of this worker in its log lines and in `worker status`. None if not given; a fleet names its own.",
    )  # fmt: skip
    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", env="LOG_LEVEL", metavar="LEVEL", help="debug, info, warning or error."
    )
    format: Literal["auto", "plain", "json"] = setting(
        "auto", env="LOG_FORMAT", metavar="FORMAT", help="plain, json, or auto: plain on a terminal and JSON elsewhere."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbacksConfig:
    """Webhooks, exports and retention, run by rq outside the token path."""

    redis_url: str | None = setting(
        None, env="CALLBACKS_REDIS_URL", metavar="URL", secret=True,
        help="Redis that rq uses. The queue's if not given.",
    )  # fmt: skip
    secret: str | None = setting(
        None, env="CALLBACKS_SECRET", metavar="SECRET", secret=True,
        help="Keys that sign webhooks (HMAC-SHA256), with spaces between. Webhooks wait until one is given.",
    )  # fmt: skip
    networks: str | None = setting(
        None, env="CALLBACKS_NETWORKS", metavar="NETWORKS",
        help="Networks that webhooks may reach although they are not public, with commas between.",
    )  # fmt: skip
    senders: int = setting(2, env="CALLBACKS_SENDERS", metavar="PROCESSES", help="Processes that send webhooks.")
    export_folder: str | None = setting(
        None, env="EXPORT_FOLDER", metavar="FOLDER",
        help="Write each batch here as JSON lines when it completes. Writes none if not given.",
    )  # fmt: skip
    prompt_retention_days: float | None = setting(
        None, env="PROMPT_RETENTION_DAYS", metavar="DAYS",
        help="Delete prompts from the history after this long. Keeps them as long as their rows if not given.",
    )  # fmt: skip
    retention_days: float | None = setting(
        None, env="RETENTION_DAYS", metavar="DAYS", help="Delete history rows older than this. Keeps all if not given."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it)."""
        yield from _positive(self, "retention_days", "prompt_retention_days", "senders")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Everything a worker is told."""

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


def _positive(section: object, *names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        value = getattr(section, name)
        if value is not None and value <= 0:
            yield name, f"must be over 0, got {value:g}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the tree, as flags, files and the environment see it."""

    section: str
    name: str
    kind: Any  # the field's annotation: a type, a union or a Literal, which have no common static type
    default: object
    env: str
    metavar: str
    help: str

    @property
    def key(self) -> str:
        """Where it stands in the TOML file: `section.name`."""
        return f"{self.section}.{self.name}"

    @property
    def env_name(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.env

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.env.lower().removesuffix("_s").replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal; empty for other kinds."""
        plain = _without_none(self.kind)
        return get_args(plain) if get_origin(plain) is Literal else ()

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false."""
        return _without_none(self.kind) is bool


def _without_none(kind: Any) -> Any:  # noqa: ANN401  # annotations, as in `Setting.kind`
    if get_origin(kind) in (Union, types.UnionType):
        return next(arm for arm in get_args(kind) if arm is not type(None))
    return kind


def _sections() -> dict[str, Any]:  # the sections are dataclasses without a common base
    return get_type_hints(WorkerConfig)


def _settings_of(section: str, kind: Any) -> Iterator[Setting]:  # noqa: ANN401  # as in `_sections`
    hints = get_type_hints(kind)
    for leaf in dataclasses.fields(kind):
        meta = leaf.metadata
        yield Setting(section, leaf.name, hints[leaf.name], leaf.default, meta["env"], meta["metavar"], meta["help"])


SETTINGS: tuple[Setting, ...] = tuple(
    leaf for section, kind in _sections().items() for leaf in _settings_of(section, kind)
)


def load_config(
    environ: Mapping[str, str], *, file: Path | None = None, flags: Mapping[str, object] | None = None
) -> WorkerConfig:
    """Build the configuration: defaults, then the file, then the environment, then flags (`section.name` to value).

    Raises:
        ConfigError: naming every setting that is wrong, by the name under which it was given.
    """
    problems: list[str] = []
    values: dict[str, object] = {}
    named: dict[str, str] = {}
    unread: set[str] = set()
    for source in (_from_file(file or _file_in(environ)), _from_environment(environ), _from_flags(flags or {})):
        for leaf, given, shown in source(problems):
            named[leaf.key] = shown
            try:
                values[leaf.key] = _read(leaf, given)
            except ValueError as error:
                problems.append(f"{shown}: {error}")
                unread.add(leaf.section)
    config = WorkerConfig(**{section: _build(section, kind, values) for section, kind in _sections().items()})
    problems.extend(_contradictions(config, named, except_in=unread))
    if problems:
        raise ConfigError(problems)
    return config


Found = Iterator[tuple[Setting, object, str]]
"""(the setting, what was given, the name under which it was given)."""


def _file_in(environ: Mapping[str, str]) -> Path | None:
    return Path(environ[CONFIG_FILE_NAME]) if environ.get(CONFIG_FILE_NAME) else None


def _from_file(path: Path | None) -> Callable[[list[str]], Found]:
    def find(problems: list[str]) -> Found:
        known = {leaf.key: leaf for leaf in SETTINGS}
        for key, given in _file_values(path, problems) if path else ():
            if key in known:
                yield known[key], given, f"{path}: {key}"
            else:
                problems.append(f"{path}: {key}: there is no such setting")

    return find


def _file_values(path: Path, problems: list[str]) -> Iterator[tuple[str, object]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return
    for section, table in tables.items():
        if isinstance(table, dict):
            yield from ((f"{section}.{name}", value) for name, value in table.items())  # pyright: ignore[reportUnknownVariableType]  # TOML is untyped
        else:
            yield section, table


def _from_environment(environ: Mapping[str, str]) -> Callable[[list[str]], Found]:
    def find(problems: list[str]) -> Found:
        known = {leaf.env_name: leaf for leaf in SETTINGS}
        for name in sorted(name for name in environ if name.startswith(PREFIX) and name not in READ_ELSEWHERE):
            if name in known:
                yield known[name], environ[name], name
            else:
                problems.append(f"{name}: there is no such setting; `worker start --help` lists them")

    return find


def _from_flags(flags: Mapping[str, object]) -> Callable[[list[str]], Found]:
    def find(problems: list[str]) -> Found:
        known = {leaf.key: leaf for leaf in SETTINGS}
        for key, given in flags.items():
            yield known[key], given, known[key].flag

    return find


_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _read(leaf: Setting, given: object) -> object:
    """The value of a setting from what was given.

    Raises:
        ValueError: it is not of the setting's kind (a sentence without the name).
    """
    if leaf.choices:
        return _one_of(leaf.choices, given)
    kind = _without_none(leaf.kind)
    if kind is bool:
        return _switch(given)
    if kind is str:
        if isinstance(given, str) and given:
            return given
        raise ValueError(f"expected text, got {given!r}")
    return _number(kind, given, leaf.metavar.lower())


def _one_of(choices: tuple[str, ...], given: object) -> object:
    if given in choices:
        return given
    raise ValueError(f"expected one of {', '.join(choices)}, got {given!r}")


def _switch(given: object) -> bool:
    if isinstance(given, bool):
        return given
    if isinstance(given, str) and given.lower() in _SWITCH:
        return _SWITCH[given.lower()]
    raise ValueError(f"expected true or false, got {given!r}")


def _number(kind: type[int] | type[float], given: object, unit: str) -> int | float:
    if isinstance(given, str | int | float) and not isinstance(given, bool):
        try:
            number = kind(given)
        except ValueError:
            number = None
        if number is not None and number == number and (isinstance(given, str) or number == given):
            return number
    raise ValueError(f"expected {unit} as a {'whole ' if kind is int else ''}number, got {given!r}")


def _build(section: str, kind: Any, values: Mapping[str, object]) -> Any:  # noqa: ANN401  # as in `_sections`
    prefix = section + "."
    return kind(**{key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)})


def _contradictions(config: WorkerConfig, named: Mapping[str, str], *, except_in: set[str]) -> Iterator[str]:
    names = {leaf.key: leaf.env_name for leaf in SETTINGS} | dict(named)
    for section in [one for one in _sections() if one not in except_in]:
        part = getattr(config, section)
        for name, problem in part.problems() if hasattr(part, "problems") else ():
            yield f"{names[f'{section}.{name}']}: {problem}"
