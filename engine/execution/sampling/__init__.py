"""Sampling: options of rows, changes of their logits, and the draw."""
