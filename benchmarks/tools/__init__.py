"""Calls of tools by a real model, on questions that others wrote."""
