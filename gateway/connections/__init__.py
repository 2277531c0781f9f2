"""Delivery of responses: a large one does not delay others, and a truncated one never looks complete."""
