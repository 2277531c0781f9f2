"""What a user could install instead, each in a virtual environment of its own that is made when it is first asked for.

Queues: `queue_side` runs the programs in `queues/`. Engines: `engine_side` runs those in `engines/`. Neither kind of
program imports the project; what the sides say to each other is in `environments`.
"""
