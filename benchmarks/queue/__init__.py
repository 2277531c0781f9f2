"""The queue compared with its peers, and its scripts for the gate."""
