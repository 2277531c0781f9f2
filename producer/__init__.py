"""The client side of Sluice: submit jobs, follow their tokens, ask for results. Needs no torch."""
