"""A model folder's tokenizer: text to token ids and back. Knows no sequences and renders no chat template.

It uses `tokenizers`; transformers is imported only for a folder without tokenizer.json. What tokenizer.json says of
normalization, splitting and decoding holds, whichever class of transformers the folder names.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from sluice.engine.errors import ModelFolderError
from sluice.engine.gguf.file import GgufFile, find_gguf, read_gguf
from sluice.engine.text.declared_tokens import merge, read_declared
from sluice.engine.text.detokenizer import ByteDetokenizer, Detokenizer, PieceDetokenizer, WindowDetokenizer
from sluice.engine.text.gguf_tokenizer import chat_template_of, read_tokenizer
from sluice.engine.text.json_files import read_json
from sluice.engine.text.text_bound import max_token_bytes
from sluice.engine.text.token_table import TokenTable

_MARK = "\x02"
"""A character that no merge of tokens goes across."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's form of a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """Tokenizer settings of a folder besides the vocabulary."""

    eos_token_id: int | None = None
    """The tokenizer's own end token."""

    special_tokens: Mapping[str, str]
    """bos_token, eos_token and so on, as named in chat templates."""

    chat_template: str | None = None
    """Jinja source, unrendered."""


class Tokenizer:
    """Text to token ids and back: a `TextDecoder` that streams. Thread-safe."""

    def __init__(self, backend: Backend, facts: TokenizerFacts) -> None:
        # Truncation and padding settings left by a training run would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.facts = facts
        self._open_stream = _stream_of(backend)
        self._bytes = _TokenBytes(backend)
        self.max_token_bytes = max_token_bytes(backend)
        """Most bytes of text that one token can stand for; None if the tokenizer does not bound them."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including added tokens."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with special tokens around it (a rendered template has them already)."""
        # `encode` holds the GIL for seconds on a long text, which would stop the engine's loop; this releases it.
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts, with the special tokens that a pair has."""
        [encoding] = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        return encoding.ids

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each of `texts`, encoded in parallel."""
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`; unknown ids give no text."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool, after: Sequence[int] = ()) -> Detokenizer:
        """Begin the text of a choice. It follows the text of the tokens `after`, if there are any."""
        if self._open_stream is None:
            return WindowDetokenizer(self, skip_special_tokens=skip_special_tokens, after=after)
        return self._open_stream(skip_special_tokens, after)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that a token adds to a text, or the text of a special token; None for an unknown id."""
        return self._bytes[token_id]

    def token_table(self) -> TokenTable | None:
        """See `SpelledDecoder`."""
        if self._open_stream is None:
            return None
        return TokenTable([self._bytes[token] or b"" for token in range(self.vocab_size)], self._special_ids)

    def spelled(self, text: str) -> list[int]:
        """See `SpelledDecoder`."""
        # What an encoder adds to the beginning of a text, such as a space, is added before the mark.
        marked = self.encode(_MARK + text, add_special_tokens=False)
        spelled, mark = b"", _MARK.encode()
        for count, token_id in enumerate(marked):
            spelled += self._bytes[token_id] or b""
            if spelled.endswith(mark):
                return marked[count + 1 :]
        return self.encode(text, add_special_tokens=False)

    @property
    def _special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special) | _special_ids(self._backend)

    def token_id(self, token: str) -> int | None:
        """Return the id of `token`, if it is one."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """Return the token with the id `token_id` as written in the vocabulary, if there is one."""
        return self._backend.id_to_token(token_id)

    def special_ids_of(self, texts: Sequence[str]) -> dict[str, int]:
        """Return those of these texts that are special tokens, with their ids."""
        special_ids = self._special_ids
        ids = {text: self._backend.token_to_id(text) for text in texts}
        return {text: token_id for text, token_id in ids.items() if token_id is not None and token_id in special_ids}

    def first_difference(self, other: "Tokenizer") -> str | None:
        """Say which token is another one in `other`; None if all are the same."""
        mine, others = (tokenizer._backend.get_vocab(with_added_tokens=True) for tokenizer in (self, other))
        differing = [(token_id, token) for token, token_id in others.items() if mine.get(token) != token_id]
        if differing:
            token_id, token = min(differing)
            return f"token {token_id} is {self.token(token_id)!r}, not {token!r}"
        if len(mine) > len(others):
            return f"there are {len(mine)} tokens, not {len(others)}"
        return None

    def added_token_at_start(self, text: str) -> int | None:
        """Return the longest added token, such as `<|im_end|>`, that `text` begins with."""
        added = self._backend.get_added_tokens_decoder()
        at_start = [token_id for token_id, token in added.items() if text.startswith(token.content)]
        return max(at_start, key=lambda token_id: len(added[token_id].content), default=None)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder or of a GGUF.

    Raises:
        ModelFolderError: it is missing, corrupt, or belongs to another model.
    """
    if (gguf := find_gguf(folder)) is not None:
        return _load_gguf(read_gguf(gguf))
    if not folder.is_dir():
        raise ModelFolderError(
            f"{folder} is not a folder: give the path of a folder with config.json and tokenizer.json."
        )
    path = folder / "tokenizer.json"
    backend, names = _read(path) if path.is_file() else _convert(folder)
    config = read_json(folder / "config.json")
    _check_vocabulary(backend, config, folder)
    return Tokenizer(backend, _read_facts(folder, backend, names))


def _load_gguf(file: GgufFile) -> Tokenizer:
    backend, names = read_tokenizer(file)
    eos_token = names.get("eos_token")
    return Tokenizer(
        backend,
        TokenizerFacts(
            eos_token_id=None if eos_token is None else backend.token_to_id(eos_token),
            special_tokens=names,
            chat_template=chat_template_of(file),
        ),
    )


def _read(path: Path) -> tuple[Backend, Mapping[str, str]]:
    """Return the tokenizer of a file, with the tokens that the files beside it declare, and its named tokens."""
    backend = _read_backend(path)
    declared = read_declared(path.parent, backend)
    merge(declared, backend)
    return backend, {name: token.content for name, token in declared.named.items()}


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelFolderError(f"{path} cannot be read as a tokenizer: {error}.") from error


def _convert(folder: Path) -> tuple[Backend, Mapping[str, str]]:
    """Let transformers build the tokenizer of a folder that has only an older form, and name its tokens."""
    # Slow to import, and not needed for most folders.
    from transformers import AutoTokenizer

    try:
        # Explicitly False: without it transformers asks interactively.
        options = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = cast("object", AutoTokenizer.from_pretrained(str(folder), **options))  # pyright: ignore[reportUnknownMemberType] - its types are partial
    except Exception as error:  # its readers raise arbitrary errors
        raise ModelFolderError(
            f"{folder} has no tokenizer.json, nor a tokenizer that can be converted: {error}"
        ) from error
    backend = cast("Backend | None", getattr(tokenizer, "backend_tokenizer", None))
    if backend is None:
        raise ModelFolderError(
            f"{folder} has no tokenizer.json, and its tokenizer has no fast form: save one with `save_pretrained`."
        )
    return backend, cast("Mapping[str, str]", getattr(tokenizer, "special_tokens_map", {}))


def _check_vocabulary(backend: Backend, config: Mapping[str, object], folder: Path) -> None:
    num_tokens, num_known = backend.get_vocab_size(with_added_tokens=False), config.get("vocab_size")
    if isinstance(num_known, int) and num_tokens > num_known:
        raise ModelFolderError(
            f"the tokenizer in {folder} has {num_tokens} tokens and the model in its config.json knows {num_known}: "
            f"they do not belong together."
        )


def _read_facts(folder: Path, backend: Backend, names: Mapping[str, str]) -> TokenizerFacts:
    eos_token = names.get("eos_token")
    return TokenizerFacts(
        eos_token_id=None if eos_token is None else backend.token_to_id(eos_token),
        special_tokens=names,
        chat_template=_read_chat_template(folder),
    )


def _read_chat_template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise ModelFolderError(f"{path} cannot be read as text: {error}.") from error
    settings = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    template = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = _default_of(cast("list[object]", template))
    if not isinstance(template, str | None):
        raise ModelFolderError(f"chat_template in {folder} must be text, or a list of objects with name and template.")
    return template


def _default_of(templates: list[object]) -> object:
    """Return the default one of several templates; an entry that is not one, if there is any."""
    for entry in templates:
        if not isinstance(entry, dict):
            return entry
        named = cast("Mapping[str, object]", entry)
        if named.get("name") == "default":
            return named.get("template")
    return None


class _Pieces:
    """What returns the tokens of a vocabulary, including special ones only if asked."""

    def __init__(self, backend: Backend, *, skips_special: bool) -> None:
        self._skipped = _special_ids(backend) if skips_special else set[int]()
        self._backend = backend

    def token(self, token_id: int) -> str:
        """Return the token as written in the vocabulary; empty if it is skipped or unknown."""
        return "" if token_id in self._skipped else self._backend.id_to_token(token_id) or ""


def _special_ids(backend: Backend) -> set[int]:
    """Return the tokens that decoding skips. A token that was special once is, whatever its flag is now."""
    return {
        token_id
        for token_id in backend.get_added_tokens_decoder()
        if backend.decode([token_id], skip_special_tokens=True) != backend.decode([token_id], skip_special_tokens=False)
    }


class _BytePieces(dict[int, "str | bytes"]):
    """Bytes or text of each token of a byte-level vocabulary. Filled on demand: most are never used."""

    def __init__(self, pieces: _Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str | bytes:
        token = self._pieces.token(token_id)
        try:
            content = bytes(_BYTES[character] for character in token)
        except KeyError:
            # An added token is stored as plain text.
            content = token.encode()
        try:
            piece: str | bytes = content.decode()
        except UnicodeDecodeError:
            piece = content
        self[token_id] = piece
        return piece


class _SentencePieces(dict[int, "str | int"]):
    """Text or byte of each token of a SentencePiece vocabulary. Filled on demand."""

    def __init__(self, pieces: _Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str | int:
        token = self._pieces.token(token_id)
        byte = _BYTE_TOKEN.fullmatch(token)
        piece = int(byte[1], 16) if byte else token.replace(_SPACE, " ")
        self[token_id] = piece
        return piece


class _TokenBytes(dict[int, "bytes | None"]):
    """Bytes of each token, special ones included. Filled on demand."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self._special = {n: token.content for n, token in backend.get_added_tokens_decoder().items() if token.special}
        self._pieces = _pieces_of(backend, skips_special=False)

    def __missing__(self, token_id: int) -> bytes | None:
        self[token_id] = text = self._read(token_id)
        return text

    def _read(self, token_id: int) -> bytes | None:
        if self._backend.id_to_token(token_id) is None:
            return None
        if token_id in self._special:
            return self._special[token_id].encode()
        if self._pieces is None:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        match self._pieces[token_id]:
            case str(text):
                return text.encode()
            case int(byte):
                return bytes([byte])
            case bytes(content):
                return content


def _characters_of_bytes() -> dict[str, int]:
    """Map bytes to their characters in byte-level vocabularies: printable Latin-1 to itself, others from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _characters_of_bytes()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")

_FUSING: list[object] = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
"""A SentencePiece vocabulary's decoder, such as Gemma's."""

_STRIPPING: list[object] = [*_FUSING, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
"""One that drops a space at the beginning, such as those of Llama 2 and Mistral."""


def _stream_of(backend: Backend) -> Callable[[bool, Sequence[int]], Detokenizer] | None:
    """Return how tokens become text one at a time; None if only the decoder itself can tell."""
    match [_pieces_of(backend, skips_special=skips) for skips in (False, True)]:
        case [_BytePieces() as shown, _BytePieces() as skipped]:
            return lambda skips, _: ByteDetokenizer(skipped if skips else shown)
        case [_SentencePieces() as shown, _SentencePieces() as skipped]:
            strips = _steps(backend.decoder) == _STRIPPING

            def open_stream(skips: bool, after: Sequence[int]) -> Detokenizer:
                pieces = skipped if skips else shown
                is_first = all(pieces[token_id] == "" for token_id in after)
                return PieceDetokenizer(pieces, strips_first_space=strips and is_first)

            return open_stream
        case _:
            return None


def _pieces_of(backend: Backend, *, skips_special: bool) -> _BytePieces | _SentencePieces | None:
    """Return the text of each token; None if that depends on the tokens around it."""
    if isinstance(backend.decoder, decoders.ByteLevel):
        return _BytePieces(_Pieces(backend, skips_special=skips_special))
    if _steps(backend.decoder) in (_FUSING, _STRIPPING):
        return _SentencePieces(_Pieces(backend, skips_special=skips_special))
    return None


def _steps(decoder: object) -> list[object]:
    """Return the steps of a sequence of decoders; none if it is another decoder."""
    return json.loads(decoder.__getstate__())["decoders"] if isinstance(decoder, decoders.Sequence) else []
