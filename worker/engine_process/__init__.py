"""An engine in its own process, so that its steps do not wait for the interpreter that serves the queue.

`remote_engine.py` is the worker's side, `child.py` the engine's; `messages.py` defines their messages. Why and
when: docs/decisions/an-engine-process.md.
"""
