"""The timeline of one job, as a picture for pages and terminals."""
