"""Developer tools: the demo, and the training of the small model."""
