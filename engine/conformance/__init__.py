"""A suite that shows whether an engine does what `sluice.engine.interface` says, and how exactly it resumes requests.

    python -m sluice.engine.conformance MODULE:FACTORY

`subject` drives an engine, `behaviours` has the checks of the interface, `resumption` stops requests after each of
their first tokens and continues them. Knows no model, no tensors and no test framework.
"""
