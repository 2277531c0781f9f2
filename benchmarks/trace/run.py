"""Trace of a whole worker: our marks (steps, stages, round trips of the queue) next to torch's profiler.

    python -m benchmarks trace [--model FOLDER] [--device cuda:0] [--jobs 12] [--tokens 24] [--out trace.json]
        [--picture steps.svg]

A real server, a real worker in this process, jobs from a client on another thread. The file opens in Perfetto
(https://ui.perfetto.dev) or chrome://tracing. Without a GPU the device's row is the time of the model's forward.
"""

import argparse
import json
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.service.parts import num_done, own_server, wait_until
from benchmarks.trace.engine import ENGINE_PLACES, Tracing
from benchmarks.trace.marks import Event, Place
from benchmarks.trace.picture import bars_of, picture, window_of
from sluice.producer.client import Producer
from sluice.producer.contract.jobs import job
from sluice.worker.checks.agreement import agree_on_queue
from sluice.worker.config import WorkerConfig, load_config
from sluice.worker.connection.clients import Connections
from sluice.worker.endpoints import find_redis
from sluice.worker.log import configure_logs
from sluice.worker.model.load import load
from sluice.worker.model.loaded_model import LocalModel
from sluice.worker.serve import round_trips as trips
from sluice.worker.serve.daemon import Daemon
from sluice.worker.serve.exchange import Exchange
from sluice.worker.serve.start import build

PLACES = (
    *ENGINE_PLACES,
    Place(Exchange, "new_requests", "take jobs"),
    Place(Exchange, "publish", "publish"),
    Place(trips, "run_many", "round trip"),
)
PROMPTS = ("Name three rivers.", "Count to thirty.", "Tell a story of a fox and a well.", "List five fruits.")


def run_worker(
    config: WorkerConfig, *, num_jobs: int, num_tokens: int, around: Callable[[Callable[[], Any]], Any]
) -> None:
    """Run a worker on this thread from start to end, with jobs for it meanwhile; `around` runs the loop."""
    endpoint = find_redis(config, os.environ)
    connections = Connections(endpoint.url, timeout_s=config.redis.timeout_s)
    served: LocalModel = load(config)
    agree_on_queue(connections.uplink.client, config, served)
    daemon = build(config, connections, served, uuid.uuid4().hex)
    submitting = threading.Thread(target=_submit, args=(daemon, num_jobs, num_tokens), name="client")
    submitting.start()
    around(daemon.run)
    submitting.join()
    connections.stop()


def _submit(daemon: Daemon, num_jobs: int, num_tokens: int) -> None:
    """Run jobs in two waves, so that prompts meet decodes; then stop the worker."""
    try:
        with Producer() as producer:
            half = num_jobs // 2
            jobs = [job(PROMPTS[n % len(PROMPTS)], max_tokens=num_tokens, ignore_eos=True) for n in range(num_jobs)]
            list(producer.submit_many(jobs[:half]))
            wait_until(lambda: _num_begun(producer) > 0, "the first jobs to run")
            list(producer.submit_many(jobs[half:]))
            wait_until(lambda: num_done(producer) == num_jobs, "all jobs to end")
    finally:
        daemon.stop()


def _num_begun(producer: Producer) -> int:
    return sum(view.running_jobs for view in producer.queue()) + num_done(producer)


def traced(config: WorkerConfig, *, num_jobs: int, num_tokens: int) -> list[Event]:
    """Return the events of both, on one clock."""
    tracing = Tracing(on_card=config.model.device != "cpu")
    with tracing.marks.on(PLACES):
        run_worker(config, num_jobs=num_jobs, num_tokens=num_tokens, around=tracing.around)
    return tracing.events()


def main(argv: list[str] | None = None) -> None:
    """Trace, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", help="The small model that ships if not given.")
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, or cuda:N.")
    parser.add_argument("--jobs", type=int, default=12, metavar="COUNT")
    parser.add_argument("--tokens", type=int, default=24, metavar="COUNT", help="Of each job.")
    parser.add_argument("--out", type=Path, default=Path("trace.json"), metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="Draw some steps as an SVG here.")
    parser.add_argument("--steps", type=int, default=3, metavar="COUNT", help="Steps in the picture.")
    asked = parser.parse_args(argv)
    with own_server():
        flags = {"model.path": asked.model, "model.device": asked.device, "log.level": "warning"}
        flags |= {"history.recorder": False, "metrics.enabled": False}
        config = load_config(os.environ, flags={name: value for name, value in flags.items() if value is not None})
        configure_logs(config.log)
        events = traced(config, num_jobs=asked.jobs, num_tokens=asked.tokens)
    asked.out.write_text(json.dumps({"traceEvents": events}))
    print(f"{asked.out}: {len(events)} events, {sum(event.get('cat') == 'sluice' for event in events)} of them ours")
    if asked.picture is not None:
        bars = bars_of(events, is_cpu=asked.device == "cpu")
        name = "the CPU" if asked.device == "cpu" else torch.cuda.get_device_name(asked.device)
        title = f"{asked.steps} steps of a worker on {name}: queue, host and device over time"
        asked.picture.write_text(picture(bars, window_of(bars, num_steps=asked.steps), title=title))
        print(f"{asked.picture}: {asked.steps} steps")


if __name__ == "__main__":
    main()
