"""Train the small model: `python -m tools.small_model.train --out worker/small_model`.

One CPU thread, for as many minutes as it is given: the learning rate falls to nothing as the time runs out, so a slow
or busy machine ends with a model too, one that has seen less. The corpus is seeded; the weights depend on the time too.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from tools.small_model import corpus
from tools.small_model.documents import DocumentMaker, DocumentStream, Packer, Rows
from tools.small_model.example import Kind
from tools.small_model.measure import teacher_forced
from tools.small_model.model import Decoder, Shape, load_weights, save_model
from tools.small_model.tokenizer import BOS, END, PAD, save_tokenizer, train_tokenizer

log = logging.getLogger("small_model")

_TOKENIZER_EXAMPLES = 3000
_WARMUP_STEPS = 80
_DECAY_SHARE = 0.85
"""Share of the time, at the end, over which the learning rate falls to nothing."""


def make_tokenizer(shape: Shape, *, seed: int) -> Tokenizer:
    """Train the tokenizer on as many examples of each kind."""
    texts = [
        text
        for kind in Kind
        for example in islice(corpus.examples(kind, seed=seed, held_out=False), _TOKENIZER_EXAMPLES)
        for text in (example.system or "", example.prompt, example.answer)
    ]
    return train_tokenizer(texts, vocab_size=shape.vocab_size)


class Trainer:
    """The model, its two optimisers, and one step of both."""

    def __init__(
        self, shape: Shape, *, matrix_lr: float = 5e-3, vector_lr: float = 5e-3, compiled: bool = True
    ) -> None:
        self.decoder = Decoder(shape)
        self._forward = torch.compile(self.decoder, dynamic=False) if compiled else self.decoder
        self._num_steps = 0
        self._peaks = (matrix_lr, vector_lr)
        matrices = [each for each in self.decoder.layers.parameters() if each.dim() == 2]
        others = [each for each in self.decoder.parameters() if not any(each is matrix for matrix in matrices)]
        # Muon (Jordan et al., 2024) for the matrices: fewer steps to the same loss than AdamW alone, measured.
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=vector_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]

    def _set_rates(self, progress: float) -> None:
        """Warm up over some steps, then fall linearly to nothing at the end."""
        factor = min(1.0, (self._num_steps + 1) / _WARMUP_STEPS, max(0.0, 1 - progress) / _DECAY_SHARE)
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor

    def step(self, batches: list[Rows], *, progress: float) -> float:
        """Learn from all batches at once and return the mean loss of a learned token, in nats.

        Args:
            batches: rows of several widths.
            progress: how much of the training is behind us, in [0, 1).
        """
        self._set_rates(progress)
        num_learned = sum(len(each.targets) for each in batches)
        total = 0.0
        for rows in batches:
            loss = self._loss(rows) / num_learned
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._num_steps += 1
        return total

    def _loss(self, rows: Rows) -> Tensor:
        hidden = self._forward(rows.token_ids, rows.positions, rows.mask).flatten(0, 1)[rows.learned]  # [N, M]
        logits = functional.linear(hidden, self.decoder.embed_tokens.weight.to(hidden.dtype)).float()  # [N, V]
        return functional.cross_entropy(logits, rows.targets, reduction="sum")


def train(arguments: argparse.Namespace) -> None:
    """Train until the time is over and write the folder, also every so often on the way."""
    torch.manual_seed(arguments.seed)
    shape = Shape()
    if arguments.resume is None:
        tokenizer = make_tokenizer(shape, seed=arguments.seed)
    else:
        tokenizer = Tokenizer.from_file(str(arguments.resume / "tokenizer.json"))
    maker = DocumentMaker(tokenizer)
    packer = Packer(iter(DocumentStream(maker, seed=arguments.seed)))
    trainer = Trainer(shape, matrix_lr=arguments.matrix_lr, vector_lr=arguments.vector_lr)
    if arguments.resume is not None:
        load_weights(trainer.decoder, arguments.resume)
    report = Report(trainer.decoder, tokenizer, arguments)
    while report.progress < 1:
        batches = packer.step()
        report.add(batches, trainer.step(batches, progress=report.progress))
    report.measure_and_save()


class Report:
    """What is said and written on the way."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, arguments: argparse.Namespace) -> None:
        self._decoder, self._tokenizer, self._arguments = decoder, tokenizer, arguments
        self._started = time.monotonic()
        self._num_steps = self._num_tokens = 0
        self._losses: list[float] = []
        num_parameters = sum(each.numel() for each in decoder.parameters())
        log.info("%d parameters, %d tokens in the vocabulary", num_parameters, tokenizer.get_vocab_size())

    @property
    def progress(self) -> float:
        """Share of the time that is over."""
        return (time.monotonic() - self._started) / (60 * self._arguments.minutes)

    def add(self, batches: list[Rows], loss: float) -> None:
        """Count a step; say the mean loss every 50 steps, measure and save more rarely."""
        self._num_steps += 1
        self._num_tokens += sum(each.token_ids.numel() for each in batches)
        self._losses.append(loss)
        if self._num_steps % 50 == 0:
            mean = sum(self._losses[-50:]) / 50
            log.info("step %d  loss %.4f  %.2f M tokens", self._num_steps, mean, self._num_tokens / 1e6)
        if self._num_steps % self._arguments.measure_every == 0:
            self.measure_and_save()

    def measure_and_save(self) -> None:
        """Ask held-out questions, say how many were answered rightly, and write the folder."""
        maker = DocumentMaker(self._tokenizer)
        scores = teacher_forced(self._decoder, maker, per_kind=self._arguments.per_kind)
        log.info("step %d, right on held-out, in per cent: %s", self._num_steps, summary(scores))
        save(self._decoder, self._tokenizer, self._arguments.out)


def summary(scores: dict[str, float]) -> str:
    """Print scores in per cent, as JSON."""
    return json.dumps({name: round(100 * score) for name, score in sorted(scores.items())})


def save(decoder: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the whole Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder)
    vocab = tokenizer.get_vocab()
    save_model(
        decoder, folder, token_ids={"bos_token_id": vocab[BOS], "eos_token_id": vocab[END], "pad_token_id": vocab[PAD]}
    )


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="Where the model goes.")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="Continue with this model and its tokenizer.")
    parser.add_argument("--minutes", type=float, default=45, help="Time to train (default %(default)s).")
    parser.add_argument("--matrix-lr", type=float, default=5e-3, help="Peak rate of Muon (default %(default)s).")
    parser.add_argument("--vector-lr", type=float, default=5e-3, help="Peak rate of AdamW (default %(default)s).")
    parser.add_argument("--seed", type=int, default=1, help="Seed of corpus and weights (default %(default)s).")
    parser.add_argument("--measure-every", type=int, default=500, metavar="STEPS", help="Measure and save so often.")
    parser.add_argument(
        "--per-kind", type=int, default=400, metavar="N", help="Held-out questions a kind when measuring."
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    random.seed(arguments.seed)
    train(arguments)


if __name__ == "__main__":
    main()
