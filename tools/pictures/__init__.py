"""The README's pictures, made from a real run of the demo and from measured figures."""
