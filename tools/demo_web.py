"""Serve OpenAI's API on this machine until Ctrl-C: a gateway, a worker with the small model, callbacks, Valkey.

Files are in `.demo-web/`, which is emptied at each start.

    make demo-web
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

FOLDER = Path(".demo-web").absolute()
STATE = FOLDER / "state"
PORT = 8000
POLL_S = 0.1
STOP_S = 60.0

WELCOME = """\
The model {model!r} is served at {url} until Ctrl-C; logs are in {folder}/.

    curl {url}/chat/completions -H 'Content-Type: application/json' -d '{request}'

    from openai import OpenAI

    client = OpenAI(base_url="{url}", api_key="none")
    for chunk in client.chat.completions.create(
        model="{model}", messages=[{{"role": "user", "content": "Count from 3 to 9."}}], temperature=0, stream=True
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
"""


@contextmanager
def running(name: str, *command: str) -> Generator[subprocess.Popen[bytes]]:
    """Run a module of ours as a process, and stop it at the end."""
    with (FOLDER / f"{name}.log").open("wb") as log:
        # In a session of its own, so that Ctrl-C reaches this process only, which then ends the others in order.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *command], stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def check(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """Check that all processes run.

    Raises:
        SystemExit: one has ended.
    """
    for name, process in processes.items():
        if process.poll() is not None:
            log = (FOLDER / f"{name}.log").read_text()
            raise SystemExit(f"{name} ended with code {process.returncode}:\n{log[-4000:]}")


def free_port() -> int:
    """Return the usual port, or any other if that is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def models_at(url: str) -> list[str]:
    """Return the models that are served; none while the gateway starts."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=5) as answer:
            return [model["id"] for model in json.load(answer)["data"]]
    except OSError:
        return []


def serve() -> None:
    """Start the processes, print how to use them, and wait until one of them ends."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    with ExitStack() as stack:
        processes = {
            "worker": ("sluice.worker", "start", "--cpu", "--metrics-port", "0"),
            "callbacks": ("sluice.worker", "callbacks"),  # for batches
            "gateway": ("sluice.producer", "serve", "--port", str(port)),
        }
        started = {name: stack.enter_context(running(name, *command)) for name, command in processes.items()}
        while not (models := models_at(url)):
            check(started)
            time.sleep(POLL_S)
        body = {"model": models[0], "messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
        print(WELCOME.format(model=models[0], url=url, folder=FOLDER.name, request=json.dumps(body)), flush=True)
        while True:
            check(started)
            time.sleep(POLL_S)


def interrupted(_number: int, _frame: FrameType | None) -> None:
    """End as with Ctrl-C."""
    raise KeyboardInterrupt


def main() -> None:
    """Run the demo."""
    from sluice.protocol.redis import embedded

    os.environ["SLUICE_STATE_DIR"] = str(STATE)
    for name in ("SLUICE_REDIS_URL", "SLUICE_DATABASE_URL", "SLUICE_QUEUE"):
        os.environ.pop(name, None)
    if STATE.exists():
        embedded.stop(STATE)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    # SIGINT too: a shell without job control lets programs in the background ignore it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    try:
        serve()
    except KeyboardInterrupt:
        print("stopped")
    finally:
        embedded.stop(STATE)


if __name__ == "__main__":
    main()
