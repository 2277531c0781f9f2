"""The checks of `worker start` before it loads the model, and of `worker doctor`, with the agreement of workers."""
