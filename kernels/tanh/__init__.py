"""tanh as a Triton device function: what a soft cap is made of, of scores and of logits.

On the CPU it is `tanh16` of native.h.
"""
