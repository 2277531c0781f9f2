"""The same file in llama.cpp and here: greedy texts of its server, and our distributions at each of their tokens."""

import json
import math
import subprocess
import tempfile
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.engine_side import PEERS, server_of
from benchmarks.peers.environments import is_installed, python_of
from benchmarks.processes import free_port, wait_until
from sluice.engine.models.decoder import Decoder
from tests.oracles.test_decoder_logits import logits_of

PEER = PEERS["llama.cpp"]
START_S, REPLY_S = 60.0, 300.0
NUM_BEST = 50
"""Tokens whose log-probabilities the server states; one that is not among them counts as infinitely far below."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, and what llama.cpp generated greedily."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parting:
    """A place where our best token is another than llama.cpp's, and by how much each prefers its own."""

    text: int
    at: int
    ours: int
    theirs: int
    margin_here: float
    margin_there: float | None
    """None where the server does not state it: at the first byte of a character."""


def server() -> Path | None:
    """Return llama.cpp's server if `python -m benchmarks engines --peers llama.cpp` has built it."""
    path = server_of(python_of(PEER.recipe)) if is_installed(PEER.recipe) else None
    return path if path is not None and path.is_file() else None


@contextmanager
def serving(gguf: Path) -> Generator[str]:
    """Serve a file with one slot; yield the server's address.

    Raises:
        RuntimeError: the server is not built, or does not start.
    """
    program = server()
    if program is None:
        raise RuntimeError("llama.cpp is not built: `python -m benchmarks engines --peers llama.cpp` does it")
    port = free_port()
    options = ["-m", gguf, "--port", str(port), "-np", "1", "-c", "2048", "-t", "2", "--cache-ram", "0", "--no-webui"]
    with tempfile.TemporaryFile() as log, subprocess.Popen([program, *options], stdout=log, stderr=log) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: _is_up(url), "llama.cpp's server", process, every_s=0.1, limit_s=START_S)
            yield url
        finally:
            process.kill()


def greedy_text(url: str, prompt: Sequence[int], num_tokens: int) -> Text:
    """Return what it generates greedily after a prompt."""
    return Text(tuple(prompt), tuple(_completed(url, prompt, num_tokens)["tokens"]))


def tokenized(url: str, text: str) -> list[int]:
    """Return the tokens of a text, those that it names among them."""
    return ask(f"{url}/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]


def partings(url: str, decoder: Decoder, texts: Sequence[Text]) -> list[Parting]:
    """Return where our best token is another, after the same tokens."""
    found: list[Parting] = []
    with torch.inference_mode():
        for number, text in enumerate(texts):
            [logits] = logits_of(decoder, [[*text.prompt, *text.tokens[:-1]]], block_size=16, chunk=128)
            ours = logits[len(text.prompt) - 1 :].float()
            for at, (theirs, row) in enumerate(zip(text.tokens, ours, strict=True)):
                best = int(row.argmax())
                if best != theirs:
                    there = _margin(url, [*text.prompt, *text.tokens[:at]], theirs, best)
                    found.append(Parting(number, at, best, theirs, float(row[best] - row[theirs]), there))
    return found


def _margin(url: str, tokens: Sequence[int], better: int, worse: int) -> float | None:
    """Return by how much llama.cpp prefers a token to another after others."""
    stated = _completed(url, tokens, 1).get("completion_probabilities")
    if not stated:
        return None
    known = {one["id"]: one["logprob"] for one in stated[0]["top_logprobs"]}
    return known.get(better, -math.inf) - known.get(worse, -math.inf)


def _completed(url: str, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:  # Any: as in `ask`
    body = {"prompt": list(prompt), "n_predict": num_tokens, "temperature": 0, "cache_prompt": False}
    return ask(f"{url}/completion", body | {"return_tokens": True, "n_probs": NUM_BEST if num_tokens == 1 else 0})


def ask(url: str, body: Mapping[str, object]) -> dict[str, Any]:  # Any: whatever JSON it answers
    """Post JSON, and return the object that is answered."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REPLY_S) as reply:
        return json.load(reply)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=REPLY_S):
            return True
    except OSError:
        return False
