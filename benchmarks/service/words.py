"""A tokenizer for random weights: every token is a byte or a word, as byte-level tokenizers have them."""

from pathlib import Path


def save_words(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json to `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"Ġw{token_id}" for token_id in range(len(alphabet), vocab_size))][:vocab_size]
    tokenizer = Tokenizer(models.BPE({name: token_id for token_id, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
