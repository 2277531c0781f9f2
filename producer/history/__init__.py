"""Queries of the job history in SQL."""
