"""Compare a real model in each form of its weights with float32: its distributions at every token of a few texts.

    python -m benchmarks quality [--tokens 256] [--model smollm2|gemma3] [--questions 100]
    python -m benchmarks quality --llama-cpp [--model smollm2|gemma3]

The texts are this project's own: prose, a table, code. Formats are written with the nearest codes, without calibration,
so the tools that publish models make better ones. The model is read from a GGUF of 4 bits once, and its numbers are the
reference: what lies on that grid already is rounded to it for nothing. Needs `python -m tools.real_model smollm2` once.

With `--questions` a worker has each form, and lm-eval asks it through the gateway which sentence follows another in
`docs`, out of four (`choices.py`).

With `--llama-cpp` it is its GGUF in llama.cpp, token by token, instead: texts that its server generates greedily after
fifty prompts, and at each of their tokens our best one. Where they part, the margins of logits say how near the
two tokens are.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality import choices, llama_cpp
from benchmarks.tables import table
from sluice.engine.config import Quantization
from sluice.engine.models.config import parse_config
from sluice.engine.models.decoder import Decoder
from sluice.engine.models.folder import open_model_folder
from sluice.engine.models.load import WeightForm, load_decoder
from sluice.engine.text.tokenizer import load_tokenizer
from tests.end_to_end.real_model.prompts import PROMPTS
from tests.engine.quantized.test_formats import DYNAMIC, FP8, INT4, INT8
from tests.engine.quantized.writing import Scheme, awq, compressed, gptq, write_folders
from tests.oracles.test_decoder_logits import logits_of
from tools.real_model.folder import MODELS, real_model_folder, real_model_gguf

TEXTS = ("docs/architecture.md", "docs/guide/models.md", "engine/scheduling/continuous.py")
PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def schemes() -> dict[str, Scheme]:
    """Return the formats that a folder is written in. Groups of 64 divide the rows of both models."""
    return {
        "AWQ, groups of 64": awq(64),
        "GPTQ, 8 bits, groups of 64": gptq(bits=8, group=64),
        "W4A16, groups of 64": compressed("pack-quantized", {**INT4, "group_size": 64}),
        "W8A8": compressed("int-quantized", INT8, activations=DYNAMIC),
        "FP8 by row": compressed("float-quantized", FP8),
    }


@dataclass(frozen=True, slots=True)
class Form:
    """A model as it is read."""

    name: str
    path: Path
    quantization: Quantization
    dtype: torch.dtype

    @property
    def options(self) -> tuple[str, ...]:
        """A worker's."""
        return ("--quantization", self.quantization, "--dtype", str(self.dtype).removeprefix("torch."))

    def load(self) -> Decoder:
        """Load it."""
        folder = open_model_folder(self.path)
        form = WeightForm(self.dtype, torch.device("cpu"), quantization=self.quantization)
        return load_decoder(parse_config(folder.config), folder.weights, form=form, max_model_len=1024, max_tokens=1024)


def gguf_forms(name: str) -> list[Form]:
    """Return the forms in which the GGUF of a real model is read."""
    gguf = real_model_gguf(name)
    dequantized = [Form(f"its GGUF, {word}", gguf, "none", dtype) for word, dtype in PLAIN.items()]
    return [*dequantized, Form("its GGUF, packed", gguf, "auto", torch.bfloat16)]


def forms(name: str) -> Iterator[Form]:
    """Yield a real model in each form, and in formats that are written for it."""
    plain = real_model_folder(name)
    yield from gguf_forms(name)
    for quantization in ("int8", "int4"):
        yield Form(f"`--quantization {quantization}`", plain, quantization, torch.bfloat16)
    for written, scheme in schemes().items():
        with tempfile.TemporaryDirectory() as out:
            yield Form(written, write_folders(plain, scheme, Path(out))[0], "auto", torch.bfloat16)


def distributions(decoder: Decoder, prompts: list[list[int]]) -> Tensor:
    """Return log-probabilities `[tokens, V]` in float32 at every token."""
    return torch.cat(logits_of(decoder, prompts, block_size=16, chunk=128)).float().log_softmax(dim=1)


def row(name: str, actual: Tensor, exact: Tensor) -> list[str]:
    """Return the line of one form."""
    divergence = (exact.exp() * (exact - actual)).sum(dim=1)
    same = int((actual.argmax(dim=1) == exact.argmax(dim=1)).sum())
    return [name, f"{same} of {len(exact)}", f"{divergence.mean():.4f}", f"{divergence.quantile(0.99):.3f}"]


def table_beside_llama_cpp(name: str) -> str:
    """Return a row for each form of a real model's GGUF."""
    gguf, rows = real_model_gguf(name), [["", "same best token", "whole texts", "margins of others: here", "there"]]
    tokenizer = load_tokenizer(gguf)
    with llama_cpp.serving(gguf) as url:
        texts = [llama_cpp.greedy_text(url, tokenizer.encode(prompt), 64) for prompt in PROMPTS]
        num_tokens = sum(len(text.tokens) for text in texts)
        for form in gguf_forms(name):
            found = llama_cpp.partings(url, form.load(), texts)
            whole = len(texts) - len({parting.text for parting in found})
            here = [parting.margin_here for parting in found]
            there = [parting.margin_there for parting in found if parting.margin_there is not None]
            same = f"{num_tokens - len(found)} of {num_tokens}"
            rows.append([form.name, same, f"{whole} of {len(texts)}", *map(_median_and_most, (here, there))])
    return table(rows)


def _median_and_most(margins: list[float]) -> str:
    return f"{statistics.median(margins):.3f}, at most {max(margins):.3f}" if margins else "-"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="Tokens of each text.")
    parser.add_argument("--model", choices=list(MODELS), default="smollm2", help="Which model.")
    parser.add_argument("--questions", type=int, default=0, help="Questions that lm-eval asks about each form.")
    parser.add_argument("--llama-cpp", action="store_true", help="Compare with llama.cpp instead.")
    given = parser.parse_args()
    if given.llama_cpp:
        print(table_beside_llama_cpp(given.model))
        return
    plain = real_model_folder(given.model, "float32")
    tokenizer = load_tokenizer(plain)
    prompts = [tokenizer.encode(Path(text).read_text())[: given.tokens] for text in TEXTS]
    rows = [["weights", "same best token", "KL divergence, mean", "99th percentile", "questions"]]
    with torch.inference_mode():
        exact = distributions(Form("float32", plain, "none", torch.float32).load(), prompts)
        for form in forms(given.model):
            right = choices.num_right(form.path, plain, form.options, given.questions) if given.questions else "-"
            rows.append([*row(form.name, distributions(form.load(), prompts), exact), f"{right}"])
    print(table(rows))


if __name__ == "__main__":
    main()
