"""OpenTelemetry traces of ended jobs, made by the recorder from the history."""
