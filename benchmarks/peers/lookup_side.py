"""Peer engines with lookup decoding: guesses of the tokens that follow, from the same prompt and output.

Each is made to generate given outputs (`engines/serve_lookup.py`), so that it guesses as it would for a model that
writes them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.engine_side import (
    LLAMA_CPP,
    PEERS,
    TORCH,
    EnginePeer,
    Serving,
    export_openvino,
    serving,
    write_gguf,
)
from benchmarks.peers.environments import Recipe

WEIGHTS = "bf16"
SERVER = "serve_lookup.py"

LOOKUP_PEERS: Mapping[str, EnginePeer] = {
    "openvino": EnginePeer(
        recipe=PEERS["openvino"].recipe, program="openvino_lookup", server=SERVER, prepare=export_openvino
    ),
    # Built from its sdist for this machine, which takes minutes.
    "llama.cpp": EnginePeer(
        recipe=Recipe(name="llama-cpp-python", installs=((*TORCH, "gguf==0.19.0", "safetensors"), (LLAMA_CPP,))),
        program="llama_cpp_lookup",
        server=SERVER,
        prepare=write_gguf,
    ),
}


def lookup_serving(
    name: str, model: Path, num_guesses: int, jobs: Sequence[tuple[Sequence[int], Sequence[int]]], folder: Path
) -> Serving:
    """Start a peer that guesses so many tokens in a step, none if 0, for pairs of prompts and outputs."""
    asked = {"model": str(model), "weights": WEIGHTS, "num_guesses": num_guesses, "jobs": jobs}
    work = folder / f"{name}-{num_guesses}.json"
    work.write_text(json.dumps(asked))
    return serving(LOOKUP_PEERS[name], model, WEIGHTS, work)
