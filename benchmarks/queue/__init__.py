"""The queue compared with its peers, and its parts: streams, durability, recorder, history."""
