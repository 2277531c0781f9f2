"""The command `worker audit`: compares the queue, the history and a producer's journal. Read `Auditor.audit` first.

It makes two passes on the live queue. What both passes see is a disagreement. `findings` defines disagreements, each
`_side` module reads one source, `repair` repairs, and `report` formats.
"""
