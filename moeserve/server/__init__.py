"""The HTTP server: OpenAI-style routes, health, metrics and the page, over an EngineClient."""
