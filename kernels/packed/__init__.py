"""Packed K and V of one layer: mixed-bit codes, scales, float16 rows and indexes in one run of bytes.

The layout (`layout.py`, `key_words.py`, `value_rows.py`) is a format between machines, of `LAYOUT_VERSION`.
"""
