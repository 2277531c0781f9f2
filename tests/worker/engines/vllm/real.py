"""The suite's subject over a real vLLM, for a Python that has it (`python -m tools.vllm_environment`).

    $(python -m tools.vllm_environment) -m sluice.engine.conformance tests.worker.engines.vllm.real:vllm_engine

MODEL names the folder, DTYPE its type; the small model in float32 if not given. OPTIONS are vLLM's own, as
`tensor_parallel_size=2`. ADAPTER=0 leaves the adapter out.
"""

import os
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from sluice.engine.conformance.subject import Subject
from sluice.engine.text.tokenizer import load_tokenizer
from sluice.worker.config import load_config
from sluice.worker.engines.registry import prepare
from sluice.worker.engines.vllm.load import UNREAD
from sluice.worker.model.folders import SMALL_MODEL, find_folder
from sluice.worker.model.load import engine_config
from sluice.worker.model.loaded_model import LocalModel
from tests.engine.conformance.subjects import subject_of
from tests.oracles.adapters import save_adapter


def vllm_engine() -> Subject:
    """The engine over vLLM, whose steps can be made to raise."""
    model = os.environ.get("MODEL", str(SMALL_MODEL))
    adapter = "one" if os.environ.get("ADAPTER", "1") == "1" else ""
    settings = {
        "SLUICE_ENGINE": "vllm",
        "SLUICE_MODEL": model,
        "SLUICE_DTYPE": os.environ.get("DTYPE", "float32"),
        "SLUICE_MAX_MODEL_LEN": "256",
        "SLUICE_BLOCK_SIZE": "32",
        "SLUICE_NUM_BLOCKS": "48",
        "SLUICE_MAX_NUM_SEQS": "6",
        "SLUICE_MAX_NUM_BATCHED_TOKENS": "64",
        "SLUICE_GRAPHS": os.environ.get("GRAPHS", "0"),
    }
    if adapter:
        settings["SLUICE_ADAPTERS"] = mkdtemp(prefix="sluice-adapters-")
        save_adapter(Path(settings["SLUICE_ADAPTERS"]) / adapter, find_folder(model))
    if "OPTIONS" in os.environ:
        settings["SLUICE_ENGINE_OPTION"] = os.environ["OPTIONS"]
    config = load_config(settings)
    loaded = prepare(config).load()
    assert isinstance(loaded, LocalModel)
    decoder = load_tokenizer(find_folder(config.model.path))
    batching, unread = engine_config(config, has_speculation=False), frozenset(UNREAD)
    return replace(subject_of(loaded.executor, decoder, batching, refused_options=unread), adapter=adapter)
