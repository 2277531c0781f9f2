"""The blocks of the KV cache: which are free, which a sequence holds, and which are found again."""
