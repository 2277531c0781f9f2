"""Other engines and kernels in the same run."""
