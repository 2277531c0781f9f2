"""`worker trace`: what each iteration of an engine does, of a worker that runs or in virtual time."""
