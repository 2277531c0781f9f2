"""What a load does before the first job: choose the kernels, use every variant, measure the largest step."""
