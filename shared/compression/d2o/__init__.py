"""D2O (Wan et al., ICLR 2025) in parts: layer budgets, token eviction, merging, and the cache of decode.

    prefill   column_sums of every layer ─► layer_budgets ─► per layer: eviction ─► merging ─► rows, scores, τ
    decode    EvictingCache: append, attend, evict one row, merge or drop it

Plans name them as the scorer "accumulated_attention", the layer allocation "attention_variance" and the
decode attention "merge"; H2O shares the cache. Pure functions and one object on one layer's tensors. Legend:
L layers, H_kv KV heads, G query heads per KV head, T prompt tokens, S rows kept per KV head, D head_dim.
Shapes, budgets and positions are the callers' to get right; wrong ones are assertions.
"""
