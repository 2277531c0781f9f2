"""The whole service on a GPU."""
