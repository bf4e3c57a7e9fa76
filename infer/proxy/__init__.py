"""A proxy that decodes branches in parallel on servers with OpenAI's `/v1/completions`, one request per branch."""
