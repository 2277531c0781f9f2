"""The host of a process: its terminal and its folder for persistent state."""
