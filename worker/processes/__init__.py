"""Processes of one host: the fleet, child processes and sidecars."""
