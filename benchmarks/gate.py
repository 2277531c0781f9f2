"""Performance regression gate: `python -m benchmarks gate` (`make bench-check`), on a machine of any speed.

Each gauge is a cost divided by a fixed reference cost measured at the same time: a step of the engine by the matrix
products alone, a script of the queue by a plain script that writes as much, the recorder by bare inserts. A slow or
busy machine affects both alike. `gate.json` holds each gauge's expected value and its spread: `--record` measures
several rounds and writes their median and spread. A check fails (exit code 1) if the median of its rounds exceeds the
recorded one by more than twice the spread, and by more than a tenth.
"""

import argparse
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.engine.scheduler import measure
from benchmarks.queue.scripts import NUM_LEASED, Bench, bench
from benchmarks.tables import table
from sluice.history.database import open_database
from sluice.history.writer import HistoryWriter
from sluice.worker.connection.clients import connect
from sluice.worker.recorder.migrate import migrate
from sluice.worker.recorder.recorder import Recorder, RecorderSettings
from tests.history import events as e
from tests.protocol.driving import ending, tokens

RECORD = Path(__file__).parent / "gate.json"
NUM_JOBS, NUM_ROWS, NUM_STREAMS, NUM_ROUNDS = 2048, 4096, 64, 64
LEAST_TOLERANCE = 0.10

PLAIN_SCRIPT = """
for i = 1, 200 do
  redis.call('SET', KEYS[1] .. i, ARGV[1], 'NX')
  redis.call('HSET', KEYS[2] .. i, 'a', i, 'b', i, 'c', ARGV[1], 'd', i, 'e', i, 'f', i, 'g', i, 'h', i)
  redis.call('XADD', KEYS[3], '*', 'e', ARGV[1])
end
redis.call('DEL', KEYS[3])
"""
"""Two hundred times a key, a hash and a stream entry: roughly what any queue on Redis writes for a job."""


def _plain_us(one: Bench) -> float:
    """Measure the server's cost of one of the plain script's two hundred."""
    script = one.queue.client.register_script(PLAIN_SCRIPT)
    before_us = one.spent_us()
    for number in range(10):
        script(keys=[f"plain:{number}:", f"hash:{number}:", "stream"], args=["x" * 100])
    return (one.spent_us() - before_us) / 2000


def submit() -> float:
    """Measure a submitted job, relative to a plain job."""
    with bench() as one:
        before_us = one.spent_us()
        one.submit(NUM_JOBS)
        return (one.spent_us() - before_us) / NUM_JOBS / _plain_us(one)


def pull_and_end() -> float:
    """Measure a job pulled, given a token and ended, relative to a plain job."""
    with bench() as one:
        one.submit(NUM_JOBS)
        worker = one.worker()
        before_us = one.spent_us()
        for _ in range(NUM_JOBS // NUM_LEASED):
            jobs = one.pull(worker, NUM_LEASED)
            worker.advance(*(tokens(job, 0, 1) for job in jobs))
            worker.advance(*(ending(job, 1) for job in jobs))
        return (one.spent_us() - before_us) / NUM_JOBS / _plain_us(one)


def publish() -> float:
    """Measure a published token of one of 64 streams, relative to a plain job."""
    with bench() as one:
        one.submit(NUM_STREAMS)
        worker = one.worker()
        jobs = one.pull(worker, NUM_STREAMS)
        before_us = one.spent_us()
        for number in range(NUM_ROUNDS):
            worker.advance(*(tokens(job, number, 1) for job in jobs))
        return (one.spent_us() - before_us) / (NUM_ROUNDS * NUM_STREAMS) / _plain_us(one)


def record() -> float:
    """Measure a row recorded from the outbox in SQLite, relative to a bare insert of forty columns."""
    with tempfile.TemporaryDirectory() as folder, bench() as one:
        engine = open_database(f"sqlite:///{folder}/history.db", is_writer=True)
        migrate(engine)
        client = connect(one.server.url, timeout_s=60)
        recorder = Recorder(client, HistoryWriter(engine), RecorderSettings(queues=(e.QUEUE,), name="gate"))
        for begin in range(0, NUM_ROWS, 256):
            events = [e.submitted(f"0.acme.{number:08d}") for number in range(begin, begin + 256)]
            client.xadd(e.KEYS.outbox, {"e": e.pack(events)})
        began_s = time.process_time()
        recorder.drain()
        took_s = time.process_time() - began_s
        engine.dispose()
        return took_s / _bare_insert_s(Path(folder) / "bare.db")


def _bare_insert_s(path: Path) -> float:
    columns = [f"c{number}" for number in range(40)]
    rows = [[number, *["text"] * 39] for number in range(NUM_ROWS)]
    with sqlite3.connect(path) as connection:
        connection.execute(f"CREATE TABLE jobs ({', '.join(columns)}, PRIMARY KEY (c0))")
        began_s = time.process_time()
        connection.executemany(f"INSERT INTO jobs VALUES ({', '.join('?' * 40)})", rows)
        connection.commit()
        return time.process_time() - began_s


def scheduler(num_running: int) -> float:
    """Measure a step's plain Python, relative to the null model's."""
    cost = measure(num_running, num_windows=30)
    return cost.best_ms / cost.executor_ms


def engine(max_num_seqs: int) -> float:
    """Measure a run of the random 125 M model, relative to its matrix products alone."""
    from benchmarks.engine import bare
    from benchmarks.engine.models import model_folder
    from sluice.engine.execution.options import ModelOptions
    from sluice.engine.execution.start.model_loading import load_model_runner

    max_num_batched_tokens = bare.MAX_NUM_BATCHED_TOKENS
    options = ModelOptions(path=model_folder(), num_blocks=2048, max_num_batched_tokens=max_num_batched_tokens)
    runner, jobs = bare.RecordingRunner(load_model_runner(options)), bare.make_jobs()
    ours_s = bare.best_of_two_s(lambda: bare.run_recorded(runner, jobs, max_num_seqs))
    return ours_s / bare.best_of_two_s(lambda: bare.run_products(runner))


OF_ENGINE: Mapping[str, Callable[[], float]] = {
    "engine at 16 / products": partial(engine, 16),
    "engine at 48 / products": partial(engine, 48),
}
GAUGES: Mapping[str, Callable[[], float]] = {
    "submit / plain script": submit,
    "pull and end / plain script": pull_and_end,
    "publish, 64 streams / plain script": publish,
    "record / bare insert": record,
    "step at 64 / null model": partial(scheduler, 64),
    "step at 256 / null model": partial(scheduler, 256),
    **OF_ENGINE,
}


def main() -> None:
    """Record the gauges, or compare them with the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write gate.json instead of comparing with it")
    parser.add_argument("--rounds", type=int, help="how often each is measured (default 3; 7 for --record)")
    parser.add_argument("--only", nargs="+", choices=list(GAUGES), default=list(GAUGES), help="these gauges alone")
    given = parser.parse_args()
    if not {*given.only}.isdisjoint(OF_ENGINE):
        from benchmarks.native_kernels import require_native_kernels

        require_native_kernels()
    rounds = given.rounds or (7 if given.record else 3)
    found = _measured(given.only, rounds)
    if given.record:
        known: dict[str, object] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        RECORD.write_text(
            json.dumps(known | {name: recorded(values) for name, values in found.items()}, indent=1) + "\n"
        )
        print(RECORD.read_text())
        return
    sys.exit(_compare(found, json.loads(RECORD.read_text())))


def _measured(names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Measure all gauges in turn, round after round, so that a slow minute affects all."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].append(GAUGES[name]())
    return found


def recorded(values: Sequence[float]) -> dict[str, float]:
    """Return a gauge's record: its median, and the largest deviation of a round as a share."""
    median = statistics.median(values)
    spread = max(abs(value - median) for value in values) / median
    return {"median": round(median, 3), "spread": round(spread, 3)}


def limit(known: Mapping[str, float]) -> float:
    """Return the largest median that passes."""
    return known["median"] * (1 + max(2 * known["spread"], LEAST_TOLERANCE))


def _compare(found: Mapping[str, Sequence[float]], known: Mapping[str, Mapping[str, float]]) -> int:
    """Print the table; return the exit code."""
    rows = [("cost / fixed cost", "recorded", "limit", "now", "rounds", "")]
    num_slower = 0
    for name, values in found.items():
        now, rounds = statistics.median(values), " ".join(f"{value:.2f}" for value in values)
        if name not in known:
            rows.append((name, "", "", f"{now:.2f}", rounds, f"not recorded: --record --only '{name}'"))
            continue
        most = limit(known[name])
        num_slower += now > most
        verdict = "SLOWER" if now > most else ""
        rows.append((name, f"{known[name]['median']:.2f}", f"{most:.2f}", f"{now:.2f}", rounds, verdict))
    print(table(rows))
    return int(num_slower > 0)


if __name__ == "__main__":
    main()
