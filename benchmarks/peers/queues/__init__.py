"""Peer queues, each a small program that runs in its own environment.

Nothing here imports the project: the programs share only `ledger` and `drive`.
"""
