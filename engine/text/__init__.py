"""Tokens to text and back: tokenizer, detokenizer, stop strings, and the output of each choice."""
