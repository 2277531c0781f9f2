"""Engines that a user could install instead, each as a small program that runs in an environment of its own.

Nothing here imports the project: `serve` is all that the programs share.
"""
