"""`kvferry compile`: kernels compiled before there is a GPU."""
