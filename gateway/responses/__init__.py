"""/v1/responses: responses that are kept, may run in the background, and whose streams can be rejoined anywhere."""
