"""Quality of quantized weights: how far a real model's distributions move."""
