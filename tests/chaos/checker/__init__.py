"""Check a drained queue from outside, by docs/reference/{wire-format,keys}.md and docs/guide/history.md alone."""
