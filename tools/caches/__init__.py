"""The Python API: a prompt's compressed KV as a cache of transformers' `generate`, in one process."""
