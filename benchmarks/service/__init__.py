"""The whole service compared with the bare engine."""
