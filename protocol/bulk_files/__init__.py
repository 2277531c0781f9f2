"""How the lines of a bulk file become jobs, for the producer that submits them and the audit that makes them again."""
