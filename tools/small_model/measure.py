"""How often the model is right, on held-out questions, by kind and task: `python -m tools.small_model.measure FOLDER`.

Two ways that agree for questions with one right answer. `teacher_forced` asks, in one pass during training, whether
each token of the answer is the most probable one. `generated` asks the finished folder through transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tools.small_model import corpus
from tools.small_model.documents import Document, DocumentMaker, lay_out
from tools.small_model.example import Example, Kind
from tools.small_model.model import Decoder

_WIDTH = 128
_ROWS = 40


def held_out(kind: Kind, count: int, *, seed: int = 0) -> list[Example]:
    """Return the first `count` held-out questions of a kind under a seed."""
    return list(islice(corpus.examples(kind, seed=seed, held_out=True), count))


@torch.no_grad()
def teacher_forced(decoder: Decoder, maker: DocumentMaker, *, per_kind: int) -> dict[str, float]:
    """Return by `kind/task` the share of answers that greedy decoding would give exactly. Leaves long ones out."""
    scores: dict[str, list[bool]] = {}
    for kind in Kind:
        pairs = [(example, _document(maker, example)) for example in held_out(kind, per_kind)]
        short = [
            (example, document) for example, document in pairs if len(document) <= _WIDTH and kind is not Kind.STORY
        ]
        for start in range(0, len(short), _ROWS):
            batch = short[start : start + _ROWS]
            right = _all_right(decoder, [document for _, document in batch])
            for (example, _), is_right in zip(batch, right, strict=True):
                scores.setdefault(f"{kind}/{example.task}", []).append(is_right)
    return {name: sum(each) / len(each) for name, each in scores.items()}


def _document(maker: DocumentMaker, example: Example) -> Document:
    return maker.completion(example) if example.is_plain else maker.conversation([example])


def _all_right(decoder: Decoder, documents: Sequence[Document]) -> list[bool]:
    """Say for each document whether all its learned tokens are the most probable ones. One document a row."""
    rows = lay_out([[document] for document in documents], _WIDTH)
    hidden = decoder(rows.token_ids, rows.positions, rows.mask).flatten(0, 1)[rows.learned]
    guesses = (hidden @ decoder.embed_tokens.weight.to(hidden.dtype).t()).argmax(-1)
    wrong_rows = set((rows.learned[guesses != rows.targets] // _WIDTH).tolist())
    return [row not in wrong_rows for row in range(len(documents))]


class Speaker:
    """The finished folder behind transformers: prompts in, greedy answers out."""

    def __init__(self, folder: str, *, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # Any: transformers types its auto classes as unions of every model it has.
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def prompt_text(self, example: Example) -> str:
        """Return the text that the model reads, special tokens included."""
        if example.is_plain:
            return self.tokenizer.bos_token + example.prompt
        messages = [{"role": "user", "content": example.prompt}]
        if example.system is not None:
            messages.insert(0, {"role": "system", "content": example.system})
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def room(self, examples: Sequence[Example]) -> int:
        """Return tokens enough for the longest expected answer, and for a story that is told in other words."""
        longest = max(len(self.tokenizer.encode(example.answer)) for example in examples)
        return longest + longest // 4 + 40

    @torch.inference_mode()
    def answers(self, examples: Sequence[Example], *, max_tokens: int) -> list[tuple[str, bool]]:
        """Return for each example the greedy answer and whether it came to its end within `max_tokens`."""
        inputs = self.tokenizer(
            [self.prompt_text(example) for example in examples],
            return_tensors="pt", padding=True, add_special_tokens=False,
        )  # fmt: skip
        output = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        return [self._read(token_ids) for token_ids in output[:, inputs["input_ids"].shape[1] :]]

    def _read(self, token_ids: Tensor) -> tuple[str, bool]:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text, bool((token_ids == self.tokenizer.eos_token_id).any())


def generated(
    speaker: Speaker, kind: Kind, *, count: int, max_tokens: int = 1800
) -> Iterator[tuple[Example, str, bool]]:
    """Yield held-out questions of a kind with the answer given, and whether it is right and came to its end."""
    examples = sorted(held_out(kind, count), key=lambda each: len(each.answer))
    for start in range(0, len(examples), _ROWS):
        some = examples[start : start + _ROWS]
        for example, (text, has_ended) in zip(some, speaker.answers(some, max_tokens=speaker.room(some)), strict=True):
            yield example, text, has_ended and example.is_right(text)


def _print_table(speaker: Speaker, kind: Kind, *, count: int) -> None:
    """Print a row of the README's table for the kind, with its tasks, and each wrong answer to stderr."""
    scores: dict[str, list[bool]] = {}
    for example, text, is_right in generated(speaker, kind, count=count):
        scores.setdefault(example.task, []).append(is_right)
        if not is_right:
            print(f"wrong: {example.prompt!r} -> {text[:120]!r}", file=sys.stderr)
    num_right = sum(map(sum, scores.values()))
    tasks = ", ".join(f"{task} {sum(each)}/{len(each)}" for task, each in sorted(scores.items()))
    print(f"| {kind} | {num_right}/{count} = {num_right / count:.1%} | {tasks} |", flush=True)


def main() -> None:
    """Print the table of right answers by kind."""
    folder = sys.argv[1]
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        speaker = Speaker(folder, dtype=dtype)
        print(f"\n{dtype}\n\n| kind | right | by task |\n|---|---|---|")
        for kind in Kind:
            _print_table(speaker, kind, count=60 if kind is Kind.STORY else 400)


if __name__ == "__main__":
    main()
