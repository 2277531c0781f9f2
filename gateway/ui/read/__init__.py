"""What pages show, read from Redis and SQL. Knows no HTML."""
