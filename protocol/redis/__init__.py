"""Connections to the queue's server: URLs, TLS, Sentinel, Cluster routing, and execution of script calls."""
