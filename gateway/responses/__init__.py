"""/v1/responses: stored responses, which may run in the background and whose streams any gateway resumes."""
