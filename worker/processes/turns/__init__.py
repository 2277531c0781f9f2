"""Several models on one device by turns: which one runs, and what its queue hears meanwhile of the others."""
