"""The bare engine on this CPU: speed compared with its peers and its bound, and profile."""
