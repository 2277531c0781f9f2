"""Peers that a user could install instead, each in its own virtual environment, created at first use.

Queues: `queue_side` runs the programs in `queues/`. Engines: `engine_side` runs those in `engines/`. These programs do
not import the project; the shared protocol is in `environments`.
"""
