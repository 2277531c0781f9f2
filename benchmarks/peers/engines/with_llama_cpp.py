"""llama.cpp's own server, built for this machine, a slot for each sequence, over HTTP on loopback, no prompt cache."""

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from serve import Work

START_S = 60.0
SLOT_TOKENS = 1024


def open_engine(work: Work) -> Callable[[], int]:
    """Start the server with the GGUF next to the model's folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    slots = str(work.max_num_seqs)
    subprocess.Popen([
        os.environ["LLAMA_SERVER"], "-m", f"{work.model}-{work.weights}.gguf", "--port", str(port), "-np", slots,
        "-c", str(SLOT_TOKENS * work.max_num_seqs), "-t", "2", "-tb", "2", "-b", "2048", "-ub", "512",
        "--cache-ram", "0", "--no-webui",
    ])  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    _wait(f"{url}/health")
    pool = ThreadPoolExecutor(len(work.requests))
    return lambda: sum(pool.map(lambda request: _complete(f"{url}/completion", *request), work.requests))


def _wait(url: str) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url)
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
        else:
            return


def _complete(url: str, prompt: list[int], count: int) -> int:
    body = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return int(json.load(reply)["tokens_predicted"])
