"""The tables of the gateway: the database, and pages of rows."""
