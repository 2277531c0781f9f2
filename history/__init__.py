"""The history of jobs in SQL: tables, rows, upserts, queries, retention and exports."""
