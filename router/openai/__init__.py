"""The OpenAI HTTP dialect: reading requests, shaping answers. Knows no node and no socket."""
