"""Examples as training rows: token ids, which of them are learned, and their positions.

Only answers are learned. Documents are packed into rows of a few widths, separated by a mask.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from tools.small_model import arithmetic, corpus, lists
from tools.small_model.example import Example, Kind, is_held_out
from tools.small_model.tokenizer import ASSISTANT, BOS, END, MAX_LENGTH, SYSTEM, USER

SHARES: dict[Kind, float] = {
    Kind.ARITHMETIC: 0.21,
    Kind.STORY: 0.10,
    Kind.FACT: 0.10,
    Kind.LIST: 0.28,
    Kind.JSON: 0.17,
    Kind.TALK: 0.14,
}
"""Share of the training tokens, prompts included."""

ROWS: dict[int, int] = {128: 24, 192: 8, 304: 5, 768: 2, 1408: 1, MAX_LENGTH: 1}
"""Width of a row in tokens -> rows in a batch. A document goes to the narrowest row that holds it."""

_LONGEST_TAIL = 100
_WORKSHEET_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One conversation or text."""

    token_ids: list[int]
    is_learned: list[bool]
    positions: list[int]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one width, ready for the model. B rows of T tokens."""

    token_ids: Tensor  # [B, T]
    positions: Tensor  # [B, T]
    mask: Tensor  # [B, 1, T, T] bf16
    learned: Tensor  # [N] indices into B * T of the tokens whose successor is learned
    targets: Tensor  # [N] those successors


class DocumentMaker:
    """A maker of documents from examples."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {text: tokenizer.token_to_id(text) for text in (BOS, END, SYSTEM, USER, ASSISTANT)}

    def conversation(self, turns: Sequence[Example]) -> Document:
        """Make one chat of several questions under the first one's system prompt."""
        token_ids, is_learned = [self._special[BOS]], [False]
        for role, text in self._messages(turns):
            ids = [self._special[role], *self._encode(text.strip()), self._special[END]]
            token_ids += ids
            is_learned += [False] + [role == ASSISTANT] * (len(ids) - 1)
        return Document(token_ids=token_ids, is_learned=is_learned, positions=list(range(len(token_ids))))

    def completion(self, example: Example) -> Document:
        """Make a text that continues where the prompt ends."""
        start = [self._special[BOS], *self._encode(example.prompt)]
        rest = [*self._encode(example.answer), self._special[END]]
        return Document(
            token_ids=start + rest,
            is_learned=[False] * len(start) + [True] * len(rest),
            positions=list(range(len(start) + len(rest))),
        )

    def worksheet(self, lines: Sequence[Example]) -> Document:
        """Make a text of plain examples, one per line: the densest form for many calculations."""
        token_ids, is_learned = [self._special[BOS]], [False]
        for line in lines:
            for text, learned in ((line.prompt, False), (line.answer, True), ("\n", False)):
                ids = self._encode(text)
                token_ids += ids
                is_learned += [learned] * len(ids)
        return Document(token_ids=token_ids, is_learned=is_learned, positions=list(range(len(token_ids))))

    @staticmethod
    def _messages(turns: Sequence[Example]) -> Iterator[tuple[str, str]]:
        if turns[0].system is not None:
            yield SYSTEM, turns[0].system
        for turn in turns:
            yield USER, turn.prompt
            yield ASSISTANT, turn.answer

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def without_middle(rng: random.Random, document: Document, *, prompt_len: int) -> Document:
    """Keep the prompt and a stretch of a long answer, at their true positions.

    The end of a long answer depends on its prompt thousands of tokens before; this teaches the distance at the cost of
    a short document. The first tokens after the gap are not learned: they cannot be predicted.
    """
    tail = rng.randint(24, _LONGEST_TAIL)
    head = min(prompt_len + rng.randint(0, 12), len(document))
    last_start = len(document) - tail
    start = max(head, last_start if rng.random() < 0.7 else rng.randint(head, max(head, last_start)))
    num_unknown = 8 if start > head else 0
    kept = [*range(head), *range(start, min(start + tail, len(document)))]
    return Document(
        token_ids=[document.token_ids[at] for at in kept],
        is_learned=[document.is_learned[at] and not start <= at < start + num_unknown for at in kept],
        positions=kept,
    )


class DocumentStream:
    """A stream of documents in which each kind has its share of the tokens."""

    def __init__(self, maker: DocumentMaker, *, seed: int) -> None:
        self._maker = maker
        self._rng = random.Random(f"documents|{seed}")
        self._examples = {kind: corpus.examples(kind, seed=seed, held_out=False) for kind in Kind}
        self._tokens = dict.fromkeys(Kind, 0.0)

    def __iter__(self) -> Iterator[Document]:
        while True:
            kind = min(Kind, key=lambda each: self._tokens[each] / SHARES[each])
            document = self._draw(kind)
            self._tokens[kind] += len(document)
            if len(document) <= MAX_LENGTH:
                yield document

    def _draw(self, kind: Kind) -> Document:
        if kind is Kind.LIST and self._rng.random() < 0.3:
            return self._draw_long_count()
        if kind is Kind.ARITHMETIC and self._rng.random() < 0.3:
            return self._maker.worksheet([self._line() for _ in range(_WORKSHEET_LINES)])
        example = next(self._examples[kind])
        if example.is_plain:
            return self._maker.completion(example)
        turns = [example]
        while kind is not Kind.STORY and self._rng.random() < 0.12 and len(turns) < 4:
            turns.append(self._another_turn(turns[0]))
        return self._maker.conversation(turns)

    def _line(self) -> Example:
        while is_held_out(line := arithmetic.worksheet_line(self._rng)):
            pass
        return line

    def _another_turn(self, first: Example) -> Example:
        """Draw a question that may follow under the same system prompt."""
        kinds = [kind for kind in Kind if kind is not Kind.STORY]
        while True:
            example = next(self._examples[self._rng.choice(kinds)])
            if not example.is_plain and example.system == first.system:
                return example

    def _draw_long_count(self) -> Document:
        while is_held_out(example := lists.count(self._rng)):
            pass
        document = self._maker.conversation([example])
        if self._rng.random() < 0.01:
            return document
        return without_middle(self._rng, document, prompt_len=document.is_learned.index(True))


class Packer:
    """A packer of documents into batches of rows, the narrowest width that holds each."""

    def __init__(self, documents: Iterator[Document]) -> None:
        self._documents = documents
        self._buffers: dict[int, list[Document]] = {width: [] for width in ROWS}

    def step(self) -> list[Rows]:
        """Return the data of one optimiser step: a batch of the narrowest rows and every other full batch."""
        narrowest = min(ROWS)
        while not self._is_full(narrowest):
            document = next(self._documents)
            self._buffers[min(width for width in ROWS if len(document) <= width)].append(document)
        return [self._pack(width) for width in ROWS if self._is_full(width)]

    def _is_full(self, width: int) -> bool:
        return sum(map(len, self._buffers[width])) >= 1.05 * width * ROWS[width]

    def _pack(self, width: int) -> Rows:
        """Fill the rows, longest documents first; the rest stays for the next batch."""
        rows: list[list[Document]] = [[] for _ in range(ROWS[width])]
        room = [width] * len(rows)
        left: list[Document] = []
        for document in sorted(self._buffers[width], key=len, reverse=True):
            row = next((at for at, space in enumerate(room) if space >= len(document)), None)
            if row is None:
                left.append(document)
            else:
                rows[row].append(document)
                room[row] -= len(document)
        self._buffers[width] = left
        return lay_out(rows, width)


def lay_out(rows: Sequence[Sequence[Document]], width: int) -> Rows:
    """Lay documents out side by side in rows of `width` tokens."""
    shape = (len(rows), width)
    token_ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    owners, is_learned = np.full(shape, -1, np.int64), np.zeros(shape, np.bool_)
    for row, documents in enumerate(rows):
        at = 0
        for owner, document in enumerate(documents):
            span = slice(at, at + len(document))
            token_ids[row, span], positions[row, span] = document.token_ids, document.positions
            owners[row, span], is_learned[row, span] = owner, document.is_learned
            at += len(document)
    predicts = np.zeros(shape, np.bool_)
    predicts[:, :-1] = is_learned[:, 1:]
    learned = np.flatnonzero(predicts)
    return Rows(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        mask=_document_mask(owners),
        learned=torch.from_numpy(learned),
        targets=torch.from_numpy(token_ids.reshape(-1)[learned + 1]),
    )


def _document_mask(owners: NDArray[np.int64]) -> Tensor:
    """Allow each token to see itself and the earlier tokens of its document. `owners` is `[B, T]`."""
    ids = torch.from_numpy(owners)
    allowed = (ids[:, :, None] == ids[:, None, :]).tril_()
    mask = torch.zeros(allowed.shape, dtype=torch.bfloat16).masked_fill_(~allowed, float("-inf"))
    return mask[:, None]
