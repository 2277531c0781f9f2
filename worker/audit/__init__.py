"""`worker audit`: does the sum come out? Read `auditor.Auditor.audit` first.

Two looks at the queue, the history and a producer's journal, while all go on; what both looks see is a disagreement.
`findings` knows what a disagreement is, the `_side` modules read one source each, `repair` mends, `report` shows.
"""
