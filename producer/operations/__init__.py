"""The operations of a client, as generators without I/O that yield commands and receive replies (`operation.py`)."""
