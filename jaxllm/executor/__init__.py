"""How a step reaches its workers."""
