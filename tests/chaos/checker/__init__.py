"""Check a drained queue from outside, by docs/reference/{wire-format,keys,history}.md alone."""
