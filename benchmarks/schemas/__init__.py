"""JSON schemas that others wrote, as structured output."""
