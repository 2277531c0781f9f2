"""Checks of `worker doctor`: everything that a worker depends on, with advice. Changes nothing."""

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

from redis.exceptions import RedisError

from sluice.engine.errors import EngineError
from sluice.kernels.compiler import COMPILERS
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.transport.urls import redacted
from sluice.worker.clock import monotonic_s
from sluice.worker.config import WorkerConfig
from sluice.worker.connection.clients import Client, connect
from sluice.worker.connection.server_checks import ServerFacts, raise_if_refused, read_facts
from sluice.worker.devices import devices_of
from sluice.worker.doctor.check_result import CheckResult
from sluice.worker.doctor.persistence_checks import check_persistence
from sluice.worker.endpoints import database_url_of, partitions_of, redis_url_of
from sluice.worker.errors import WorkerError
from sluice.worker.model.load import NULL, engine_config, find_folder, is_name

MAX_LATENCY_MS = 5.0
"""A round trip longer than this delays tokens noticeably."""

MAX_SKEW_S = 1.0
"""Stored times are the server's. With more skew, they do not match this host's logs."""

PINGS = 20


def examine(config: WorkerConfig, environ: Mapping[str, str]) -> list[CheckResult]:
    """Run all checks in the order in which a worker needs them."""
    checks: list[tuple[str, Callable[[], Iterator[CheckResult]]]] = [
        ("settings", lambda: _settings(config)),
        ("redis", lambda: _redis(config, environ)),
        ("history", lambda: _history(config, environ)),
        ("device", lambda: _device(config)),
        ("model", lambda: _model(config)),
        ("kernels", lambda: _kernels(config)),
    ]
    return [result for what, check in checks for result in _guarded(what, check)]


def _guarded(what: str, check: Callable[[], Iterator[CheckResult]]) -> Iterator[CheckResult]:
    try:
        yield from check()
    except (WorkerError, EngineError) as error:
        yield CheckResult(what=what, found=str(error), is_well=False)


def _settings(config: WorkerConfig) -> Iterator[CheckResult]:
    engine_config(config)
    yield CheckResult(what="settings", found=f"queue {config.queue.name!r}, {config.queue.partitions} partition(s)")


# ---------------------------------------------------------------- redis


def _redis(config: WorkerConfig, environ: Mapping[str, str]) -> Iterator[CheckResult]:
    url = redis_url_of(config, environ)
    client = connect(url, timeout_s=config.redis.timeout_s)
    try:
        facts = read_facts(client)
        yield CheckResult(what="redis", found=f"{facts.name} {facts.version} at {redacted(url)}")
        for problem in facts.problems():
            yield CheckResult(what="redis", found=problem, is_well=False)
        yield from check_persistence(client, partitions_of(config)[0])
        for keys in partitions_of(config):
            yield from _queue_clock(client, keys)
        yield _memory(facts)
        yield _latency(client)
        yield _clock(client)
    except (RedisError, OSError) as error:
        raise_if_refused(error, url)
        advice = "Check the URL, the network, and that the server runs."
        yield CheckResult(what="redis", found=f"{redacted(url)} does not answer: {error}", is_well=False, advice=advice)


def _memory(facts: ServerFacts) -> CheckResult:
    limit = f"{facts.maxmemory / 2**20:.0f} MiB" if facts.maxmemory else "no limit"
    return CheckResult(what="redis memory", found=f"{limit}, maxmemory-policy {facts.maxmemory_policy}")


def _latency(client: Client) -> CheckResult:
    trips_ms: list[float] = []
    for _ in range(PINGS):
        began_s = monotonic_s()
        client.ping()
        trips_ms.append((monotonic_s() - began_s) * 1000)
    found = f"{median(trips_ms):.2f} ms a round trip (median of {PINGS}; slowest {max(trips_ms):.2f} ms)"
    is_well = median(trips_ms) <= MAX_LATENCY_MS
    advice = None if is_well else "Tokens arrive this much later. Run the worker nearer to Redis."
    return CheckResult(what="redis latency", found=found, is_well=is_well, advice=advice)


def _clock(client: Client) -> CheckResult:
    seconds, microseconds = client.time()
    skew_s = time.time() - (seconds + microseconds / 1e6)
    is_well = abs(skew_s) <= MAX_SKEW_S
    advice = None if is_well else "Stored times are the server's. Synchronise the clocks (NTP)."
    return CheckResult(what="clock", found=f"{skew_s:+.3f} s from the server's", is_well=is_well, advice=advice)


def _queue_clock(client: Client, keys: QueueKeys) -> Iterator[CheckResult]:
    """Find test clocks on the queue, which break times to live, deadlines, leases and retries."""
    config = keys.key("config")
    for name in ("test_clock_ms", "test_clock_offset_ms"):
        value = client.hget(config, name)
        if value is not None:
            found = f"{name} is {value.decode(errors='replace')}: the queue's time is not the server's"
            advice = f"It is for tests only. Remove it: HDEL {config} {name}"
            yield CheckResult(what="queue clock", found=found, is_well=False, advice=advice)


# ---------------------------------------------------------------- history


def _history(config: WorkerConfig, environ: Mapping[str, str]) -> Iterator[CheckResult]:
    # Imported here because SQLAlchemy is slow to import.
    from sqlalchemy.exc import SQLAlchemyError

    from sluice.producer.contract.database import HistoryError, HistoryMissing, check_schema, open_database
    from sluice.producer.contract.tables import SCHEMA_REVISION

    url = database_url_of(config, environ)
    try:
        engine = open_database(url)
        shown = engine.url.render_as_string(hide_password=True)
        if engine.dialect.name == "sqlite" and not Path(engine.url.database or "").exists():
            yield CheckResult(what="history", found=f"{shown} will be created at the first start")
            return
        with engine.connect() as connection:
            check_schema(connection)
        yield CheckResult(what="history", found=f"{shown}, schema {SCHEMA_REVISION}")
    except HistoryMissing as error:
        yield CheckResult(what="history", found=str(error), is_well=False, advice="Run `worker migrate`.")
    except HistoryError as error:
        yield CheckResult(what="history", found=str(error), is_well=False)
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        advice = "Jobs run without it. The outbox in Redis keeps their events until it answers."
        yield CheckResult(what="history", found=f"does not answer: {reason}", is_well=False, advice=advice)


# ---------------------------------------------------------------- device, model, compiler


def _device(config: WorkerConfig) -> Iterator[CheckResult]:
    if importlib.util.find_spec("torch") is None:
        advice = "Install the worker's dependencies: pip install 'sluice-llm[worker]'."
        yield CheckResult(what="device", found="torch is not installed", is_well=False, advice=advice)
        return
    import torch

    if config.model.device == "cpu":
        yield CheckResult(what="device", found=f"cpu, {torch.get_num_threads()} threads, torch {torch.__version__}")
        return
    for name in devices_of(config.model.device, count_gpus=lambda: max(1, torch.cuda.device_count())):
        yield _gpu(int(name.partition(":")[2] or 0))


def _gpu(index: int) -> CheckResult:
    import torch

    count = torch.cuda.device_count()
    if index < count:
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        return CheckResult(what="device", found=f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    advice = "Choose another with --gpu, or run on --cpu."
    return CheckResult(what="device", found=f"no GPU {index}: torch sees {count}", is_well=False, advice=advice)


def _model(config: WorkerConfig) -> Iterator[CheckResult]:
    path = config.model.path
    if path is not None and path.partition("?")[0] == NULL:
        yield CheckResult(what="model", found="the null model, which computes nothing")
        return
    if path is not None and is_name(path):
        yield CheckResult(what="model", found=f"{path} is not a folder on this host; it will be downloaded at startup")
        return
    folder = find_folder(path)
    # Imported here so that the doctor runs without the worker's dependencies.
    from sluice.engine.models.folder import open_model_folder
    from sluice.engine.text.tokenizer import load_tokenizer

    opened, tokenizer = open_model_folder(folder), load_tokenizer(folder)
    family = opened.config.get("model_type", "unknown")
    chat = "with" if tokenizer.facts.chat_template else "without"
    yield CheckResult(what="model", found=f"{folder}: {family}, {tokenizer.vocab_size} tokens, {chat} chat template")


def _kernels(config: WorkerConfig) -> Iterator[CheckResult]:
    """Check the CPU kernels as a start loads them; for a GPU, the compiler that Triton's launchers need."""
    if config.model.device == "cpu" and importlib.util.find_spec("torch") is not None:
        from sluice.kernels import native

        packaged = native.packaged_library()
        if native.library() is None:
            found, advice = "none, PyTorch's operators are used", f"{native.SLOWER} {native.ADVICE}"
            yield CheckResult(what="kernels", found=found, is_well=False, advice=advice)
        else:
            yield CheckResult(what="kernels", found=f"for {packaged.stem}" if packaged else "compiled on this machine")
        return
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is not None:
        yield CheckResult(what="compiler", found=compiler)
        return
    advice = "Triton compiles a launcher for each kernel at first use. Install gcc or clang."
    yield CheckResult(what="compiler", found="none", is_well=False, advice=advice)
