"""GGUF, llama.cpp's file format: what a header says, and tensors in its types. Knows no model and no tokenizer."""
