"""kvferry: long-context chat whose KV cache is compressed before it travels."""
