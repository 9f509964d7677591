"""The OpenAI-compatible HTTP server. fastapi, pydantic and uvicorn are imported in this package and the demo alone."""
