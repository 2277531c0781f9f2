"""Trial of the Triton kernels at load: each is compiled, run and compared with its reference at a model's sizes.

In separate processes, since an illegal access takes a process's device away. Correctness only: what is fast is
measured beforehand (`kernels/tuned.py`).
"""
