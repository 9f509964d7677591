"""What stands behind the doors: LLM and the parts of the command line."""
