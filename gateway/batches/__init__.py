"""Batches of OpenAI's API: a file of requests becomes jobs of a queue, and their outcomes become files."""
