"""A tokenizer for random weights: every token is a word."""

from pathlib import Path


def save_words(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json to `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.WordPiece(prefix="##")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
