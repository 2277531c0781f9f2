"""A hostile user with the documented rights to submit writes at random while jobs of others run."""
