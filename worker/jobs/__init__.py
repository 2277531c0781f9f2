"""The jobs that a worker holds: leases, channels, progress, results and retries."""
