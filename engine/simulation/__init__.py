"""Replay arrivals through the real engine, in real or virtual time, to measure or predict a batching discipline.

`arrivals` generates requests; `executor` computes nothing and advances a virtual clock by the duration of each step
(`engine.scheduling.timing`), configured or fitted to measured steps; `replay` sends arrivals through an engine and
records the results; `figures` summarises them; `capacity` finds the largest rate that meets a target. Nothing here
imports torch.
"""
