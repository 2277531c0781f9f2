"""What a client can do, as generators without I/O that yield commands and are sent replies (`operation.py`)."""
