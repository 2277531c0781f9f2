"""What the recorder writes: events as rows, the statements that merge them, and one transaction a batch."""
