"""Arrivals through the real engine, in real or in virtual time: what a way of batching gives, and what it would give.

`arrivals` makes them; `step_time` says how long a step takes, given or fitted to measured steps; `executor` computes
nothing and lets that time pass on a clock of its own; `replay` sends arrivals through an engine and notes what happens;
`figures` sums that up; `capacity` looks for the largest rate that a target bears. Nothing here imports torch.
"""
