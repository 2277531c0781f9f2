"""Growth of cost with load: one module of curves for each part, and `curves` to fit, print and draw them."""
