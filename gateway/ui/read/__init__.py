"""The data of the pages, read from Redis and SQL. No HTML."""
