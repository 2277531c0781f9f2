"""Connections to Redis: clients, availability, notifications."""
