"""Ask llama.cpp's server for one token with each schema: a program of its own, as `peer`, with the same arguments.

LLAMA_SERVER names the server, and GGUF a model.
"""

import json
import os
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

START_S = 60.0


def main() -> None:
    """Compile them in turn."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "-np", "1", "-c", "256", "-t", "2", "--no-webui"]
    subprocess.Popen(
        [os.environ["LLAMA_SERVER"], "-m", os.environ["GGUF"], *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + START_S
    while not _is_ready(port):
        if time.monotonic() > deadline_s:
            raise TimeoutError("the server does not start")
        time.sleep(0.1)
    for text in json.loads(Path(sys.argv[1]).read_text())[int(sys.argv[2]) :]:
        print(json.dumps(_reason(port, text)), flush=True)


def _is_ready(port: int) -> bool:
    try:
        return _answer(port, "GET", "/health", None)[0] == 200
    except OSError:
        return False


def _reason(port: int, text: str) -> str:
    """Return why a schema does not compile; nothing if it does. A server that has crashed ends the program."""
    body = f'{{"prompt": [1], "n_predict": 1, "json_schema": {text}}}'
    status, said = _answer(port, "POST", "/completion", body)
    return "" if status == 200 else str(said)[:200]


def _answer(port: int, method: str, path: str, body: str | None) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(errors="replace")


if __name__ == "__main__":
    main()
