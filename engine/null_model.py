"""A model that computes nothing: tokens are a hash of (seed, position, choice, prompt).

For queue tests and chaos tests.

Knows no tensors and imports no torch. It keeps the contract of a real executor: the same request gives the same tokens
in any batch. Tokens are bytes, so every prompt can be encoded and every output can be decoded.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import hypot, log
from struct import pack, unpack

from sluice.engine.batch import NO_READS, Admission, Batch, Read, Sampled, ScheduledRow
from sluice.engine.executor import Computed, ModelLimits
from sluice.engine.request import UNPREDICTED, Embed, PromptRead, SampledLogprobs
from sluice.engine.speculation.verification import verified_rows
from sluice.engine.text.detokenizer import ByteDetokenizer
from sluice.engine.text.token_table import TokenTable

END_OF_SEQUENCE = 256
"""The token after the 256 bytes."""

_VOCABULARY_SIZE = 257
_PIECES: Mapping[int, str | bytes] = {
    **{byte: chr(byte) for byte in range(0x80)},
    **{byte: bytes([byte]) for byte in range(0x80, 0x100)},
    END_OF_SEQUENCE: "",
}
# 32 entries: the top five bits of a hash choose one.
_LETTERS = b"etaoin shrdlu cmfwyp vbgkjqxz .\n"
_ROWS = tuple(Sampled((letter,)) for letter in _LETTERS)
_END_ROW = Sampled((END_OF_SEQUENCE,))
_LIKELIEST = tuple((letter, log(count / len(_LETTERS))) for letter, count in Counter(_LETTERS).most_common())
_LOGPROBS = dict(_LIKELIEST)
_HIDDEN_SIZE = 16
"""Dimensions of the vector of a prompt."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NullModelConfig:
    """Simulated properties of the null model."""

    max_model_len: int = 8192
    num_blocks: int = 4096
    block_size: int = 16
    sliding_window: int = 0
    window_groups: int = 0
    num_host_blocks: int = 0
    step_s: float = 0.0
    """Minimum duration of each step."""

    token_s: float = 0.0
    """Added duration per computed token, including padding."""

    host_s: float = 0.0
    """Time of each step in which the interpreter is busy, as it is while it launches kernels."""

    mean_output_tokens: int = 0
    """Each output token ends the sequence with probability 1/n. 0: never."""


class NullTokenizer:
    """Bytes as tokens: a `TextDecoder` and its encoder."""

    eos_token_ids = frozenset({END_OF_SEQUENCE})
    vocab_size = _VOCABULARY_SIZE
    max_token_bytes = 1

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the UTF-8 bytes of `text`; there are no special tokens to add."""
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Decode bytes to text; invalid UTF-8 becomes U+FFFD, and the end-of-sequence token gives no text."""
        return bytes(token_id for token_id in token_ids if token_id < END_OF_SEQUENCE).decode(errors="replace")

    def stream(self, *, skip_special_tokens: bool, after: Sequence[int] = ()) -> ByteDetokenizer:
        """Begin the text of a choice."""
        return ByteDetokenizer(_PIECES)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the byte that a token is; None for the end of a sequence, which has no text."""
        return bytes([token_id]) if token_id < END_OF_SEQUENCE else None

    def token_table(self) -> TokenTable:
        """See `SpelledDecoder`."""
        return TokenTable([bytes([byte]) for byte in range(END_OF_SEQUENCE)], frozenset({END_OF_SEQUENCE}))

    def spelled(self, text: str) -> list[int]:
        """See `SpelledDecoder`."""
        return self.encode(text)


class NullModel:
    """An `Executor` without a model."""

    lag = 0

    def __init__(self, config: NullModelConfig | None = None, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.config = config if config is not None else NullModelConfig()
        self._sleep = sleep
        self._keys: dict[int, tuple[int, int | None]] = {}
        """By slot: the key of its tokens, and how many log-probabilities are requested."""

        self._admissions: dict[int, Admission] = {}
        """By slot. A step admits sequences that it may have no time for: which are read, only later steps say."""

        self._silent: set[int] = set()
        """The slots of sequences that generate nothing."""

    @property
    def limits(self) -> ModelLimits:
        """See `Executor.limits`."""
        return ModelLimits(
            max_model_len=self.config.max_model_len,
            vocab_size=_VOCABULARY_SIZE,
            eos_token_ids=NullTokenizer.eos_token_ids,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            sliding_window=self.config.sliding_window,
            window_groups=self.config.window_groups,
            num_host_blocks=self.config.num_host_blocks,
            hidden_size=_HIDDEN_SIZE,
            num_classes=1,
        )

    @property
    def fingerprint(self) -> str:
        """See `Executor.fingerprint`."""
        return f"null-1-{self.config.mean_output_tokens}"

    def launch(self, batch: Batch) -> Computed:
        """Draw a token for each sequence that samples. See `Executor.launch`."""
        if self.config.host_s:
            end_s = time.perf_counter() + self.config.host_s
            while time.perf_counter() < end_s:
                pass
        if self.config.step_s or self.config.token_s:
            num_tokens = batch.num_tokens + batch.num_padding_tokens
            self._sleep(self.config.step_s + self.config.token_s * num_tokens)
        self.admit(batch)
        drawn = self.draw(batch)
        if batch.drafts:
            drawn = verified_rows([row for row in batch.rows if row.samples], batch.drafts, drawn)
        return Computed(drawn)

    def admit(self, batch: Batch) -> None:
        """Take the admissions of `batch`."""
        for admission in batch.admissions:
            self._keys[admission.slot] = _key(admission), admission.sampling.logprobs
            self._admissions[admission.slot] = admission
            (self._silent.discard if admission.sampling.max_tokens else self._silent.add)(admission.slot)

    def draw(self, batch: Batch) -> list[Sampled]:
        """Return a token for each row of `batch` that samples, whose slot was admitted, and one for each draft."""
        if batch.reads or (self._silent and any(row.slot in self._silent for row in batch.rows)):
            return self._draw_reading(batch)
        drafts, masks = batch.drafts, batch.masks
        if not drafts and not masks:
            return [self._draw(row) for row in batch.rows if row.samples]
        return [
            self._draw(row, num_drafts)
            if row.sequence_id not in masks
            else self._draw_allowed(row, num_drafts, masks[row.sequence_id][num_drafts])
            for row in batch.rows
            if row.samples
            for num_drafts in range(1 + len(drafts.get(row.sequence_id, ())))
        ]

    def _draw_reading(self, batch: Batch) -> list[Sampled]:
        """Draw as `draw` does, and return what is read of prompts that are whole."""
        rows: list[Sampled] = []
        for row in filter(lambda row: row.samples, batch.rows):
            read = batch.reads.get(row.sequence_id)
            is_silent = row.slot in self._silent
            first, *others = [Sampled(())] if is_silent else self.draw(replace(batch, rows=(row,), reads=NO_READS))
            if read is not None:
                first = first._replace(prompt=_read(self._admissions[row.slot], read))
            rows += [first, *others]
        return rows

    def _draw_allowed(self, row: ScheduledRow, num_drafts: int, mask: bytes) -> Sampled:
        """Draw as `_draw`, from those of a mask: printable ASCII or the end, if there are any."""
        allowed = [token for token in range(_VOCABULARY_SIZE) if mask[token >> 3] >> (token & 7) & 1]
        if not allowed:
            return Sampled((), error="every token was masked")
        plain = [token for token in allowed if 0x20 <= token < 0x7F or token == END_OF_SEQUENCE] or allowed
        bits, num_asked = self._bits(row, num_drafts)
        sampled = Sampled((plain[bits % len(plain)],))
        return sampled if num_asked is None else self._with_logprobs(sampled, num_asked)

    def _bits(self, row: ScheduledRow, num_drafts: int) -> tuple[int, int | None]:
        """Return the noise of a token, and how many log-probabilities are requested."""
        key, num_asked = self._keys[row.slot]
        bits = (key ^ (row.start + row.num_tokens + num_drafts)) * _MULTIPLIER & _MASK
        return (bits ^ bits >> 29) * _MULTIPLIER & _MASK, num_asked

    def _draw(self, row: ScheduledRow, num_drafts: int = 0) -> Sampled:
        """Draw the token of `row`, or the one that follows its first `num_drafts` drafts."""
        bits, num_asked = self._bits(row, num_drafts)
        mean = self.config.mean_output_tokens
        sampled = _END_ROW if mean and (bits >> 8) % mean == 0 else _ROWS[bits >> 59]
        return sampled if num_asked is None else self._with_logprobs(sampled, num_asked)

    def _with_logprobs(self, row: Sampled, num_asked: int) -> Sampled:
        """Add log-probabilities: those of letters are given that the sequence does not end."""
        [token_id] = row.token_ids
        chosen = _LOGPROBS.get(token_id)
        if chosen is None:
            chosen = -log(self.config.mean_output_tokens or _VOCABULARY_SIZE)
        return row._replace(logprobs=(SampledLogprobs(chosen=chosen, top=_LIKELIEST[:num_asked]),))


def _key(admission: Admission) -> int:
    """Hash everything that the tokens of a sequence depend on except their position."""
    prompt = array("I", admission.token_ids[: admission.num_prompt_tokens]).tobytes()
    salt = admission.sampling.seed.to_bytes(8, "little") + admission.choice.to_bytes(4, "little")
    return int.from_bytes(blake2b(prompt, digest_size=8, key=salt).digest(), "little")


def _read(prompt: Admission, read: Read) -> PromptRead:
    token_ids = prompt.token_ids[: prompt.num_prompt_tokens]
    if read.embed is not None:
        return PromptRead(embedding=_vector(token_ids, read.embed))
    least = -log(_VOCABULARY_SIZE)
    top = _LIKELIEST[: read.num_logprobs]
    return PromptRead(
        logprobs=(
            UNPREDICTED,
            *(SampledLogprobs(chosen=_LOGPROBS.get(token, least), top=top) for token in token_ids[1:]),
        )
    )


def _vector(token_ids: tuple[int, ...], wanted: Embed) -> bytes:
    """Return a vector that depends on every token and on the pooling."""
    digest = blake2b(array("I", token_ids).tobytes(), digest_size=2 * _HIDDEN_SIZE, key=wanted.pooling.encode())
    values: tuple[int, ...] = unpack(f"<{_HIDDEN_SIZE}h", digest.digest())[: wanted.dimensions]
    if wanted.is_classified:
        return pack("<f", values[0] / 2**13)
    length = (hypot(*values) or 1.0) if wanted.is_normalised else float(2**15)
    return pack(f"<{len(values)}f", *(value / length for value in values))
