"""What things cost as the work grows: one module of curves for each part, and `curves` to fit, print and draw them."""
