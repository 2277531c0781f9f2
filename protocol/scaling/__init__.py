"""How many workers a queue needs: its backlog in tokens, and what a worker gets through. No I/O."""
