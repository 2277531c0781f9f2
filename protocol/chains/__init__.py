"""Chains: jobs that wait until other jobs of the queue have ended, and may use their outputs.

A queue keeps its blocked jobs in partition 0, in chains: the jobs of one submit, which wait for the same jobs. Any
process may release them, and several at once: a job has its id from its submit on, and the queue accepts an id once.
"""
