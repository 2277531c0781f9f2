"""Small real tokenizers, made in the test: byte-level BPE, and SentencePiece with byte fallback."""

# The types of `tokenizers` are partial.
# pyright: reportUnknownMemberType=false

from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café, 10 € or 10 £; 日本語 and 中文",
    "emoji 😀 and 👩‍👩‍👧 too, the end of the text",
]


@cache
def byte_level_backend() -> Backend:
    """As Llama 3 and Qwen have it: bytes as tokens, merges of them, special and plain added tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["日本", "two words", AddedToken("ñandú", normalized=False)])
    backend.add_special_tokens(["<|é|>"])
    return backend


@cache
def sentence_piece_backend() -> Backend:
    """As Llama 2 and Mistral have it: pieces with a mark for the space, and a token for each byte."""
    words = sorted({"▁" + word for line in CORPUS[:1] for word in line.split()} | set("abcdefghijklmnop▁é"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "▁▁"]
    backend = Backend(
        models.BPE(vocab={t: n for n, t in enumerate(tokens)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@cache
def gemma_backend() -> Backend:
    """As Gemma has it: the same, without a space before the first word."""
    backend = Backend.from_str(sentence_piece_backend().to_str())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


@cache
def metaspace_backend() -> Backend:
    """A decoder that nothing of ours knows: windows are decoded."""
    backend = Backend(models.WordLevel({t: n for n, t in enumerate(["▁one", "▁two", "three", "▁", "[END]"])}))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["[END]"])
    return backend
