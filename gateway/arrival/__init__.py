"""Bounds on how requests arrive: their time, headers, encodings, connections, and the memory that bodies take."""
