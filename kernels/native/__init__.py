"""What a decode step does on a CPU in C, for float32: compiled on the machine where it runs.

Ops ask `dispatch.py` whether it is used; `library.py` compiles it.
"""
