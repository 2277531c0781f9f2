"""Conversion of a bulk file's lines to jobs, for the producer that submits them and the audit that rebuilds them."""
