"""OpenTelemetry traces of ended jobs, made by the recorder from what the history knows."""
