"""Decoder-only transformers: one configurable block, a table of families, rotary embeddings. Knows no scheduler."""
