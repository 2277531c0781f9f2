"""`worker start`: the loop, the exchange with the queue, heartbeat and metrics."""
