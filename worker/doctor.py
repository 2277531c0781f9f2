"""`worker doctor`: looks at everything a worker depends on, and says what to do. Changes nothing."""

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

from redis.exceptions import RedisError

from engine.errors import EngineError
from producer.config import redacted
from producer.contract.keys import QueueKeys
from worker.clock import monotonic_s
from worker.config import WorkerConfig
from worker.connections import Client, connect
from worker.devices import devices_of
from worker.errors import WorkerError
from worker.finding import Finding
from worker.keeping import keeping_findings
from worker.places import database_url_of, partitions_of, redis_url_of
from worker.server import ServerFacts, raise_if_refused, read_facts
from worker.serving import NULL, engine_config, find_folder, is_name

MAX_LATENCY_MS = 5.0
"""A slower Redis delays tokens visibly."""

MAX_SKEW_S = 1.0
"""Stored times are the server's; a host that is further off shows odd times in its own logs."""

PINGS = 20


def examine(config: WorkerConfig, environ: Mapping[str, str]) -> list[Finding]:
    """Look at everything, in the order in which a worker needs it."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("settings", lambda: _settings(config)),
        ("redis", lambda: _redis(config, environ)),
        ("history", lambda: _history(config, environ)),
        ("device", lambda: _device(config)),
        ("model", lambda: _model(config)),
        ("compiler", _compiler),
    ]
    return [finding for what, check in checks for finding in _guarded(what, check)]


def _guarded(what: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except (WorkerError, EngineError) as error:
        yield Finding(what=what, found=str(error), is_well=False)


def _settings(config: WorkerConfig) -> Iterator[Finding]:
    engine_config(config)
    yield Finding(what="settings", found=f"queue {config.queue.name!r}, {config.queue.partitions} partition(s)")


# ---------------------------------------------------------------- redis


def _redis(config: WorkerConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    url = redis_url_of(config, environ)
    client = connect(url, timeout_s=config.redis.timeout_s)
    try:
        facts = read_facts(client)
        yield Finding(what="redis", found=f"{facts.name} {facts.version} at {redacted(url)}")
        for problem in facts.problems():
            yield Finding(what="redis", found=problem, is_well=False)
        yield from keeping_findings(client, partitions_of(config)[0])
        for keys in partitions_of(config):
            yield from _queue_clock(client, keys)
        yield _memory(facts)
        yield _latency(client)
        yield _clock(client)
    except (RedisError, OSError) as error:
        raise_if_refused(error, url)
        advice = "Check the URL, the network and that the server runs."
        yield Finding(what="redis", found=f"{redacted(url)} does not answer: {error}", is_well=False, advice=advice)


def _memory(facts: ServerFacts) -> Finding:
    limit = f"{facts.maxmemory / 2**20:.0f} MiB" if facts.maxmemory else "no limit"
    return Finding(what="redis memory", found=f"{limit}, maxmemory-policy {facts.maxmemory_policy}")


def _latency(client: Client) -> Finding:
    trips_ms: list[float] = []
    for _ in range(PINGS):
        began_s = monotonic_s()
        client.ping()
        trips_ms.append((monotonic_s() - began_s) * 1000)
    found = f"{median(trips_ms):.2f} ms a round trip (median of {PINGS}; slowest {max(trips_ms):.2f} ms)"
    is_well = median(trips_ms) <= MAX_LATENCY_MS
    advice = None if is_well else "Tokens arrive this much later. Run the worker nearer to Redis."
    return Finding(what="redis latency", found=found, is_well=is_well, advice=advice)


def _clock(client: Client) -> Finding:
    seconds, microseconds = client.time()
    skew_s = time.time() - (seconds + microseconds / 1e6)
    is_well = abs(skew_s) <= MAX_SKEW_S
    advice = None if is_well else "Stored times are the server's. Synchronise the clocks (NTP)."
    return Finding(what="clock", found=f"{skew_s:+.3f} s from the server's", is_well=is_well, advice=advice)


def _queue_clock(client: Client, keys: QueueKeys) -> Iterator[Finding]:
    """Settings that tests leave behind: with them no time to live, deadline, lease or retry runs as it should."""
    config = keys.key("config")
    for name in ("test_clock_ms", "test_clock_offset_ms"):
        value = client.hget(config, name)
        if value is not None:
            found = f"{name} is {value.decode(errors='replace')}: the queue's time is not the server's"
            advice = f"It is for tests alone. Remove it: HDEL {config} {name}"
            yield Finding(what="queue clock", found=found, is_well=False, advice=advice)


# ---------------------------------------------------------------- history


def _history(config: WorkerConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    # SQLAlchemy takes a moment to import.
    from sqlalchemy.exc import SQLAlchemyError

    from producer.contract.database import HistoryError, HistoryMissing, check_schema, open_database
    from producer.contract.tables import SCHEMA_REVISION

    url = database_url_of(config, environ)
    try:
        engine = open_database(url)
        shown = engine.url.render_as_string(hide_password=True)
        if engine.dialect.name == "sqlite" and not Path(engine.url.database or "").exists():
            yield Finding(what="history", found=f"{shown} will be made at the first start")
            return
        with engine.connect() as connection:
            check_schema(connection)
        yield Finding(what="history", found=f"{shown}, schema {SCHEMA_REVISION}")
    except HistoryMissing as error:
        yield Finding(what="history", found=str(error), is_well=False, advice="Run `worker migrate`.")
    except HistoryError as error:
        yield Finding(what="history", found=str(error), is_well=False)
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        advice = "Jobs run without it; the outbox in Redis keeps their rows until it is back."
        yield Finding(what="history", found=f"does not answer: {reason}", is_well=False, advice=advice)


# ---------------------------------------------------------------- device, model, compiler


def _device(config: WorkerConfig) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        advice = "Install the worker's parts: pip install 'sluice[worker]'."
        yield Finding(what="device", found="torch is not installed", is_well=False, advice=advice)
        return
    import torch

    if config.model.device == "cpu":
        yield Finding(what="device", found=f"cpu, {torch.get_num_threads()} threads, torch {torch.__version__}")
        return
    for name in devices_of(config.model.device, count_gpus=lambda: max(1, torch.cuda.device_count())):
        yield _gpu(int(name.partition(":")[2] or 0))


def _gpu(index: int) -> Finding:
    import torch

    count = torch.cuda.device_count()
    if index < count:
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        return Finding(what="device", found=f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    advice = "Choose another with --gpu, or run on --cpu."
    return Finding(what="device", found=f"no GPU {index}: torch sees {count}", is_well=False, advice=advice)


def _model(config: WorkerConfig) -> Iterator[Finding]:
    path = config.model.path
    if path is not None and path.partition("?")[0] == NULL:
        yield Finding(what="model", found="the null model: computes nothing")
        return
    if path is not None and is_name(path):
        yield Finding(what="model", found=f"{path} is no folder here: it will be downloaded at start")
        return
    folder = find_folder(path)
    # Both need torch's neighbours, which doctor may run without.
    from engine.loader import open_model_folder
    from engine.tokenizer import load_tokenizer

    opened, tokenizer = open_model_folder(folder), load_tokenizer(folder)
    family = opened.config.get("model_type", "unknown")
    chat = "with" if tokenizer.facts.chat_template else "without"
    yield Finding(what="model", found=f"{folder}: {family}, {tokenizer.vocab_size} tokens, {chat} chat template")


def _compiler() -> Iterator[Finding]:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found:
        yield Finding(what="compiler", found=found)
        return
    advice = "CPU kernels run in plain torch, which is slower. Install gcc or clang."
    yield Finding(what="compiler", found="none", is_well=False, advice=advice)
