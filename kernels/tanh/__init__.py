"""tanh as a Triton device function, for the soft caps of scores and logits.

On the CPU it is `tanh16` of native.h.
"""
