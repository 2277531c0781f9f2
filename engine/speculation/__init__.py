"""Speculation: guess a sequence's next tokens, and verify all of them in one step. Read `drafting.Drafting` first."""
