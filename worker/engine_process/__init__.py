"""An engine in a process of its own, so that its steps do not wait for the interpreter that serves the queue.

`remote_engine.py` is the worker's side, `child.py` the engine's; `messages.py` is what they say to each other. Why and
when: docs/decisions/an-engine-process.md.
"""
