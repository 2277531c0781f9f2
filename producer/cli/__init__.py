"""The command line of the client: `producer`."""

from sluice.protocol.host.optional_packages import without

# redis-py imports OpenTelemetry's SDK, a quarter of the command's imports, and no command sends its metrics.
with without("opentelemetry"):
    import redis as redis
