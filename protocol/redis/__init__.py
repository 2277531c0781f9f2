"""Run script calls on a connection: execution, cluster routing, TLS. Used by producers and workers."""
