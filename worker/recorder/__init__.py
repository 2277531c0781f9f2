"""The recorder, which writes the outbox into the history, and the migration of the history's schema."""
