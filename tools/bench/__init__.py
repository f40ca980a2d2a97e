"""`kvferry bench`: sends load to any OpenAI-compatible server and measures what clients see."""
