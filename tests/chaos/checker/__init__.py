"""A program that checks a drained queue from outside. It knows docs/wire-format.md and docs/history.md, and no code."""
