"""The timeline of one job, drawn for pages and terminals."""
