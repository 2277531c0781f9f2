"""Fault injection for tests of recovery from a failing executor."""
