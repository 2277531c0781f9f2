"""Number of workers that a queue needs, from its backlog in tokens and the throughput of a worker. No I/O."""
