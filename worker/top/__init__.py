"""`worker top`: the workers of a queue, live in a terminal."""
