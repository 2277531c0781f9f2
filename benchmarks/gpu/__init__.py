"""GPU benchmark: correctness, speed, service and peers."""
