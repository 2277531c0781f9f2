"""The gateway's web page at /ui, for operators and tenants."""
