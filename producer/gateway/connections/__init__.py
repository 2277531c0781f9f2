"""How connections end that cannot go on: slow clients, and the end of the process. Never as if an answer were whole."""
