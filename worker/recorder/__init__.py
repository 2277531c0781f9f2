"""What writes the outbox into the history, and the schema that it needs."""
