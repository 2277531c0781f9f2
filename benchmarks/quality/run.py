"""Compare a real model in each form of its weights with float32: its distributions at every token of a few texts.

    python -m benchmarks quality [--tokens 256] [--model smollm2|gemma3]

The texts are this project's own: prose, a table, code. Formats are written with the nearest codes, without calibration,
so the tools that publish models make better ones. The model is read from a GGUF of 4 bits once, and its numbers are the
reference: what lies on that grid already is rounded to it for nothing. Needs `python -m tools.real_model smollm2` once.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.tables import table
from sluice.engine.config import Quantization
from sluice.engine.models.config import parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.engine.text.tokenizer import load_tokenizer
from tests.engine.quantized.test_formats import DYNAMIC, FP8, INT4, INT8
from tests.engine.quantized.writing import Scheme, awq, compressed, gptq, write_folders
from tests.oracles.test_decoder_logits import logits_of
from tools.real_model.folder import MODELS, real_model_folder

TEXTS = ("docs/architecture.md", "docs/guide/models.md", "engine/scheduling/continuous.py")
MADE: Mapping[str, Quantization] = {
    "bfloat16": "none",
    "`--quantization int8`": "int8",
    "`--quantization int4`": "int4",
}


def schemes() -> dict[str, Scheme]:
    """Return the formats that a folder is written in. Groups of 64 divide the rows of both models."""
    return {
        "AWQ, groups of 64": awq(64),
        "GPTQ, 8 bits, groups of 64": gptq(bits=8, group=64),
        "W4A16, groups of 64": compressed("pack-quantized", {**INT4, "group_size": 64}),
        "W8A8": compressed("int-quantized", INT8, activations=DYNAMIC),
        "FP8 by row": compressed("float-quantized", FP8),
    }


def load(path: Path, quantization: Quantization, dtype: torch.dtype) -> Decoder:
    """Load a model."""
    folder = open_model_folder(path)
    form = WeightForm(dtype, torch.device("cpu"), quantization=quantization)
    return load_decoder(parse_config(folder.config), folder.weights, form=form, max_model_len=1024, max_tokens=1024)


def distributions(decoder: Decoder, prompts: list[list[int]]) -> Tensor:
    """Return log-probabilities `[tokens, V]` in float32 at every token."""
    return torch.cat(logits_of(decoder, prompts, block_size=16, chunk=128)).float().log_softmax(dim=1)


def row(name: str, actual: Tensor, exact: Tensor) -> list[str]:
    """Return the line of one form."""
    divergence = (exact.exp() * (exact - actual)).sum(dim=1)
    same = int((actual.argmax(dim=1) == exact.argmax(dim=1)).sum())
    return [name, f"{same} of {len(exact)}", f"{divergence.mean():.4f}", f"{divergence.quantile(0.99):.3f}"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="Tokens of each text.")
    parser.add_argument("--model", choices=list(MODELS), default="smollm2", help="Which model.")
    given = parser.parse_args()
    plain = real_model_folder(given.model, "float32")
    tokenizer = load_tokenizer(plain)
    prompts = [tokenizer.encode(Path(text).read_text())[: given.tokens] for text in TEXTS]
    with torch.inference_mode():
        exact = distributions(load(plain, "none", torch.float32), prompts)
        packed = plain.with_name(MODELS[given.model].gguf)
        rows = [row("its GGUF, packed", distributions(load(packed, "auto", torch.bfloat16), prompts), exact)]
        for name, quantization in MADE.items():
            rows.append(row(name, distributions(load(plain, quantization, torch.bfloat16), prompts), exact))
        for name, scheme in schemes().items():
            with tempfile.TemporaryDirectory() as out:
                quantized, _ = write_folders(plain, scheme, Path(out))
                rows.append(row(name, distributions(load(quantized, "auto", torch.bfloat16), prompts), exact))
    print(table([["weights", "same best token", "KL divergence, mean", "99th percentile"], *rows]))


if __name__ == "__main__":
    main()
