"""Replay arrivals through the real engine, in real or virtual time, to measure or predict a batching discipline.

`arrivals` generates requests; `step_time` gives the duration of a step, configured or fitted to measured steps;
`executor` computes nothing and advances a virtual clock by that duration; `replay` sends arrivals through an engine and
records the results; `figures` summarises them; `capacity` finds the largest rate that meets a target. Nothing here
imports torch.
"""
