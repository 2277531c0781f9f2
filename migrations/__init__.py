"""Steps that build the history's tables, in order. Finds what they must become in `producer.contract.tables`."""
