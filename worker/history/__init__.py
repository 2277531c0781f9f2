"""The history of jobs in SQL: the recorder, its rows and upserts, migrations, retention and exports."""
