"""The tokenizer inside a GGUF, as one of `tokenizers`.

Two kinds are read: byte-level BPE ("gpt2"), whose texts are split by the rules that llama.cpp knows by name, and
SentencePiece's BPE ("llama"), whose merges follow from the scores of its tokens.
"""

# The types of `tokenizers` are partial.
# pyright: reportUnknownMemberType=false

from array import array
from collections.abc import Iterator, Mapping

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from sluice.engine.errors import ModelFolderError
from sluice.engine.gguf.file import GgufFile, Value

_SPACE = "\u2581"
_PREFIX = "tokenizer.ggml."
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_REST_OF_CASED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join(_CASED) + r"|\p{N}" + _REST_OF_CASED
_GPT4O = "|".join(f"{word}{_CONTRACTION}?" for word in _CASED) + r"|\p{N}{1,3}" + _REST_OF_CASED
_SEED = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = r"\p{N}"

_RULES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "mpt", "exaone4"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (_DIGITS, _GPT2)
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "seed-coder": (_SEED,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""How a text is split before it is encoded, by llama.cpp's names: each rule splits the pieces of the one before."""

_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "tekken"}
"""Rules of vocabularies in which a piece that is a token is that token, whatever its merges are."""

_STARTING = _WHOLE_WORDS
"""Rules of vocabularies whose texts begin with the first token unless the file denies it."""


def read_tokenizer(file: GgufFile) -> tuple[Backend, dict[str, str]]:
    """Return the tokenizer of a file, and its named tokens.

    Raises:
        ModelFolderError: there is none, it is damaged, or of another kind.
    """
    kind, tokens = _field(file, "model"), _field(file, "tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelFolderError(f"{file.path} has no tokenizer: {_PREFIX}tokens must be a list of texts.")
    if kind not in ("gpt2", "llama"):
        raise ModelFolderError(f"{file.path}: tokenizer {kind!r} is not one of gpt2, llama.")
    try:
        backend = _byte_level(file, tokens) if kind == "gpt2" else _sentence_piece(file, tokens)
        _add_tokens(backend, file, tokens)
        _add_ends(backend, file, tokens, starts=kind == "llama" or _rule(file) in _STARTING)
    except ModelFolderError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ModelFolderError(f"the tokenizer of {file.path} is damaged: {error}.") from error
    return backend, _named(file, tokens)


def chat_template_of(file: GgufFile) -> str | None:
    """Return the chat template of a file."""
    template = file.metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def _field(file: GgufFile, name: str) -> "Value | None":
    return file.metadata.get(_PREFIX + name)


def _rule(file: GgufFile) -> str:
    return str(_field(file, "pre") or "default")


def _byte_level(file: GgufFile, tokens: list[str]) -> Backend:
    rule, merges = _rule(file), _field(file, "merges")
    if rule not in _RULES:
        raise ModelFolderError(f"{file.path}: the rule {rule!r} of its tokenizer is not one of {', '.join(_RULES)}.")
    if not isinstance(merges, list):
        raise ModelFolderError(f"{file.path}: {_PREFIX}merges must be a list of texts.")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Backend(models.BPE(vocab=_vocabulary(tokens), merges=pairs, ignore_merges=rule in _WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _RULES[rule]]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(file: GgufFile, tokens: list[str]) -> Backend:
    scores = _field(file, "scores")
    if not isinstance(scores, array) or len(scores) != len(tokens):
        raise ModelFolderError(f"{file.path}: {_PREFIX}scores must be a number for each token.")
    unknown = [token for token, kind in zip(tokens, _types(file, tokens), strict=True) if kind == _UNKNOWN]
    backend = Backend(
        models.BPE(
            vocab=_vocabulary(tokens),
            merges=_merges(tokens, scores),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = _field(file, "add_space_prefix") is not False
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    fusing = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*fusing, decoders.Strip(" ", 1, 0)] if has_prefix else fusing)
    return backend


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Return the ids of tokens; of two with one text, the first has it."""
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        ids.setdefault(token, token_id)
    return ids


def _merges(tokens: list[str], scores: "array[int] | array[float]") -> list[tuple[str, str]]:
    """Return the pairs that make tokens, the highest score first, as SentencePiece merges them."""
    ids = _vocabulary(tokens)

    def pairs_of(token_id: int) -> Iterator[tuple[str, str]]:
        token = tokens[token_id]
        halves = ((token[:end], token[end:]) for end in range(1, len(token)))
        found = [(left, right) for left, right in halves if left in ids and right in ids]
        return iter(sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]])))

    order = sorted(range(len(tokens)), key=lambda token_id: -scores[token_id])
    return [pair for token_id in order for pair in pairs_of(token_id)]


def _types(file: GgufFile, tokens: list[str]) -> "array[int] | array[float]":
    types = _field(file, "token_type")
    if not isinstance(types, array) or len(types) != len(tokens):
        return array("i", [1] * len(tokens))
    return types


def _add_tokens(backend: Backend, file: GgufFile, tokens: list[str]) -> None:
    """Add the tokens that are found in a text before it is split: all at once, since each call builds their search."""
    kinds = list(zip(tokens, _types(file, tokens), strict=True))

    def added(*wanted: int, special: bool) -> list[AddedToken]:
        return [
            AddedToken(token, normalized=False, special=special) for token, kind in kinds if token and kind in wanted
        ]

    backend.add_special_tokens(added(_CONTROL, _UNKNOWN, special=True))
    backend.add_tokens(added(_USER_DEFINED, special=False))


def _add_ends(backend: Backend, file: GgufFile, tokens: list[str], *, starts: bool) -> None:
    """Let texts begin and end with the tokens that the file says."""
    add_start, add_end = _field(file, "add_bos_token"), _field(file, "add_eos_token")
    named = _named(file, tokens)
    first = named.get("bos_token") if (starts if add_start is None else add_start) else None
    last = named.get("eos_token") if add_end else None
    around = [(token, backend.token_to_id(token)) for token in (first, last) if token is not None]
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=[*([first] if first else []), "$A", *([last] if last else [])],
            pair=[*([first] if first else []), "$A", "$B", *([last] if last else [])],
            special_tokens=list(dict(around).items()),
        )


def _named(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    found = {name: _field(file, f"{field}_token_id") for name, field in _NAMES.items()}
    return {
        name: tokens[token_id]
        for name, token_id in found.items()
        if isinstance(token_id, int) and 0 <= token_id < len(tokens)
    }
