"""Decide what each step computes: the scheduler, KV blocks, policies and batching disciplines. Imports no torch."""
