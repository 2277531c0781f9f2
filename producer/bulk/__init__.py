"""Submit the jobs of a file exactly once, and write their results to files."""
