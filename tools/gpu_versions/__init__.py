"""The code for a GPU on this CPU, under the versions that it has run with on a GPU."""
