"""What developers run: the demo, and the making of the small model."""
