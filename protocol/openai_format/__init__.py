"""Requests in OpenAI's format."""
