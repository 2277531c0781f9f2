"""Processor time of everything but the step, by part: what a service adds to its engine, on a machine of any load.

    python -m benchmarks beside [--sequences 1,16,48] [--rounds 3] [--model llama-100m] [--no-stream] [--read]

The requests of `benchmarks cpu` through the whole service (embedded server with its append-only file, worker process,
recorder into SQLite, tokens on channels), by the null model, whose steps are waits as long as those of the 100 M model;
with --model by a random model itself. Milliseconds of processor time per 1,000 output tokens, medians of the rounds:

- engine: the loop's thread but for the step and the text: scheduling, commits, handing over;
- text: detokenization, stop strings and the values that carry both;
- exchange, pulling: these threads of the worker; other: its remaining threads, and its parent process;
- recorder, server, client: these processes. The client submits, and polls one job every 0.2 s; with --read it follows
  all of them.

`benchmarks service` prints the same beside the ratio of service and engine.
"""

import argparse
import os
import statistics
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

from benchmarks.engine.bare import Job
from benchmarks.queue.processor_time import children_of, threads_s
from benchmarks.service.load import batching, jobs_of, run_jobs
from benchmarks.service.measured_worker import CLOCKS, CLOCKS_VARIABLE, MODULE, STEP, TEXT
from benchmarks.service.parts import embedded_client, own_server, wait_until, worker
from sluice.producer.client import Producer
from sluice.producer.contract.keys import QueueKeys

PACE_S = {1: 0.009, 16: 0.017, 48: 0.065}
"""Length of a step of the 100 M model, by sequences at once (docs/lab/service.md)."""

PARTS = ("engine", "text", "exchange", "pulling", "other", "recorder", "server", "client")
Parts = dict[str, float]
"""By part: seconds, or milliseconds per 1,000 tokens."""


@dataclass(frozen=True, slots=True)
class Meter:
    """Reads the processor time of a running service by part."""

    parent: int
    worker: int
    recorder: int
    server: int
    clocks: Path
    client: Any  # redis-py's replies are untyped

    def read(self) -> Parts:
        """Return seconds so far, once the recorder has written all."""
        outbox = QueueKeys("default").outbox
        wait_until(lambda: self.client.xlen(outbox) == 0, "the recorder", every_s=0.1)
        clocks_s, threads = CLOCKS.unpack(self.clocks.read_bytes()), threads_s(self.worker)
        main_s, exchange_s, pulling_s = (threads.pop(name, 0.0) for name in ("main", "exchange", "pulling"))
        # Threads without a name compute steps with the loop's thread.
        threads.pop("python", None)
        return {
            "engine": main_s - clocks_s[STEP] - clocks_s[TEXT],
            "text": clocks_s[TEXT],
            "exchange": exchange_s,
            "pulling": pulling_s,
            "other": threads.total() + threads_s(self.parent).total(),
            "recorder": threads_s(self.recorder).total(),
            "server": threads_s(self.server).total(),
            "client": process_time(),
        }


@contextmanager
def measured_worker(folder: Path, *options: str) -> Generator[Meter]:
    """Run a worker of the embedded server in `folder`, with a recorder, that can be measured."""
    clocks = folder / "clocks"
    clocks.write_bytes(CLOCKS.pack(0, 0))
    os.environ[CLOCKS_VARIABLE] = str(clocks)
    with worker(*options, log=folder / "worker.log", program=("-m", MODULE)) as process:
        wait_until(lambda: _children(process.pid).keys() == {"start", "record"}, "the recorder to start")
        found = _children(process.pid)
        client = embedded_client(folder)
        server = int(client.info("server")["process_id"])
        yield Meter(process.pid, found["start"], found["record"], server, clocks, client)


def _children(parent: int) -> dict[str, int]:
    """Return the processes that the parent of a worker has started, by their command."""
    found: dict[str, int] = {}
    for pid in children_of(parent):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        # One that has not begun yet still has its parent's.
        found.update({name: pid for name in ("start", "record") if name in words and "--until-eof" in words})
    return found


def per_thousand(before: Parts, after: Parts, num_tokens: int) -> Parts:
    """Return milliseconds per 1,000 tokens between two readings."""
    return {part: 1e6 * (after[part] - before[part]) / num_tokens for part in PARTS}


def medians(rounds: Sequence[Parts]) -> Parts:
    """Return the median of each part."""
    return {part: statistics.median(one[part] for one in rounds) for part in PARTS}


def measured_run(producer: Producer, meter: Meter, jobs: Sequence[Job], **how: bool) -> tuple[float, Parts]:
    """Run jobs; return seconds, and milliseconds per 1,000 tokens of each part."""
    before = meter.read()
    took_s = run_jobs(producer, jobs, **how)
    return took_s, per_thousand(before, meter.read(), sum(job.num_output_tokens for job in jobs))


def header() -> str:
    """Return the heading of `row`."""
    return " ".join([f"{'sequences':>9}", *(f"{part:>8}" for part in PARTS), f"{'all':>8}"])


def row(num_seqs: int, parts: Parts) -> str:
    """Return a line of the table."""
    return " ".join([f"{num_seqs:9}", *(f"{parts[part]:8.1f}" for part in PARTS), f"{sum(parts.values()):8.1f}"])


def measure(num_seqs: int, num_rounds: int, model: str | None, *, stream: bool, read: bool) -> list[Parts]:
    """Measure rounds of one case, after one that is not counted."""
    if model is None:
        path = f"null?step_s={PACE_S[num_seqs]}"
    else:
        from benchmarks.engine.models import model_folder

        path = str(model_folder(model))
    jobs = jobs_of(num_seqs, is_null=model is None)
    flags = ("--model", path, *batching(num_seqs))
    with own_server() as folder, Producer() as producer, measured_worker(folder, *flags) as meter:
        run_jobs(producer, jobs, stream=stream)
        return [measured_run(producer, meter, jobs, stream=stream, read=read)[1] for _ in range(num_rounds)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", default="1,16,48", help=f"of {', '.join(map(str, PACE_S))} (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--model", help="a random model instead of the null model, such as llama-100m")
    parser.add_argument("--no-stream", action="store_true", help="submit jobs with stream=False")
    parser.add_argument("--read", action="store_true", help="follow all jobs")
    given = parser.parse_args()
    print(f"processor time in ms per 1,000 output tokens, load {os.getloadavg()[0]:.1f} before\n{header()}", flush=True)
    for num_seqs in map(int, given.sequences.split(",")):
        rounds = measure(num_seqs, given.rounds, given.model, stream=not given.no_stream, read=given.read)
        print(row(num_seqs, medians(rounds)), flush=True)


if __name__ == "__main__":
    main()
