"""A small task of lm-eval on each form of a real model: which sentence follows another in this project's documents.

lm-eval asks the gateway, as it would ask any server; it runs in the environment of the tests' clients. No data set is
downloaded: the questions are made of `docs`, each with the sentence that follows and those of three other places.
"""

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from benchmarks.processes import ROOT, server, worker
from tests.clients.environments import python_client
from tests.gateway.gateway_process import gateway_process

NUM_CHOICES = 4


def questions(count: int) -> list[tuple[str, list[str]]]:
    """Return pairs of a sentence and what may follow it; the first one does."""
    text = "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n") if re.match(r"[A-Z][a-z]", paragraph))
    pairs = [sentences for paragraph in paragraphs if len(sentences := re.split(r"(?<=[.]) ", paragraph)) > 1]
    random = Random(0)
    chosen = random.sample([(first, then) for first, then, *_ in pairs if 30 < len(then) < 160], count)
    sentences = [f" {then}" for _, then in chosen]
    others = [random.sample([one for one in sentences if one != f" {then}"], NUM_CHOICES - 1) for _, then in chosen]
    return [(first, [f" {then}", *three]) for (first, then), three in zip(chosen, others, strict=True)]


def num_right(model: Path, tokenizer: Path, options: Sequence[str], count: int) -> int:
    """Return how many questions a worker with this model and these options answers as the text goes on."""
    with tempfile.TemporaryDirectory() as folder, server() as here:
        file, named = Path(folder, "questions.jsonl"), Path(folder, tokenizer.name + model.suffix * model.is_file())
        file.write_text("".join(json.dumps({"text": text, "choices": many}) + "\n" for text, many in questions(count)))
        named.symlink_to(model)  # lm-eval asks for the folder's name
        with (
            worker(here, *options, model=str(named)),
            gateway_process(here.url, is_fork=False) as gateway,
        ):
            [found] = python_client("evaluation").using(gateway.url).run("served", str(tokenizer), str(file))[-1:]
    return sum(max(scores)[0] == scores[0][0] for scores in found["scores"])
