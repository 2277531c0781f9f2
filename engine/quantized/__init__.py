"""Published formats of quantized weights in safetensors: what a config states, and their codes. Knows no model."""
