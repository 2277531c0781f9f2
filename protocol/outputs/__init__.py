"""How the text of a model marks its parts: what it thinks, what it says, and the functions that it calls."""
