"""Real switches between two models on this CPU: seconds from asking one worker to stop until the next is ready."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from benchmarks.engine.models import model_folder
from benchmarks.tables import table
from sluice.producer import Producer
from sluice.worker.model.folders import SMALL_MODEL
from tests.servers import redis_server

NUM_TURNS = 5
FILE = """
[workers.large]
model = "{large}"
queue = "large"
turns = "device"
[workers.small]
model = "{small}"
queue = "small"
turns = "device"
"""


def measure() -> str:
    """Let the shipped model and one of 125 M parameters take turns; return a table of their switches."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        with redis_server() as server:
            switches = _run_fleet(folder, server.url)
    rows = [("to", "model.safetensors MiB", "switches", "mean s", "max s")]
    for model, path in (("large", model_folder()), ("small", SMALL_MODEL)):
        of_model = [one for to, one in switches if to == model]
        size = f"{sum(file.stat().st_size for file in path.glob('*.safetensors')) / 2**20:.0f}"
        rows.append((path.name, size, str(len(of_model)), f"{mean(of_model):.2f}", f"{max(of_model):.2f}"))
    return table(rows)


def _run_fleet(folder: Path, url: str) -> Sequence[tuple[str, float]]:
    file, log = folder / "models.toml", folder / "log"
    file.write_text(FILE.format(large=model_folder(), small=SMALL_MODEL))
    command = [sys.executable, "-m", "sluice.worker", "fleet", str(file), "--redis-url", url, "--log-format", "json"]
    with log.open("wb") as stream:
        fleet = subprocess.Popen([*command, "--no-recorder", "--no-metrics"], stderr=stream, env=dict(os.environ))
    try:
        with Producer(url, queue="large") as large, Producer(url, queue="small") as small:
            for producer in (large, small) * NUM_TURNS:
                producer.result(producer.submit("Hello", max_tokens=4), timeout_s=120)
    finally:
        fleet.send_signal(signal.SIGTERM)
        fleet.wait(60)
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [(line["workers"], line["switch_s"]) for line in lines if line["event"] == "turn began"][1:]
