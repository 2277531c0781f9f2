"""An HTTP server with OpenAI's API in front of a queue. It owns no job: any number may run, and each may be killed."""
