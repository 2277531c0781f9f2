"""What producer and worker agree on: messages, keys, states, limits, scripts and tables. Knows neither side."""
