"""Schedules: jobs that are submitted again and again, at the times of a cron rule.

A queue keeps its schedules in partition 0. Any process may fire them, and several at once: a run has the same job ids
in each of them, and the queue accepts an id once.
"""
