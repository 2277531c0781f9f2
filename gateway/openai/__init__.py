"""Responses in OpenAI's format."""
