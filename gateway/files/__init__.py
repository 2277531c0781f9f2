"""Files that clients upload and batches write: rows in SQL, contents at an fsspec URL."""
