"""D2O (Wan et al., ICLR 2025) in parts: layer budgets, token eviction, merging, and decode's cache.

    prefill   column_sums of every layer ─► layer_budgets ─► per layer: eviction ─► merging ─► rows, scores, τ
    decode    EvictingCache: append, attend, evict one row, merge or drop it

Plans name them as the scorer "accumulated_attention", the layer allocation "attention_variance" and the
decode attention "merge"; H2O uses the same cache. Pure functions, and one object for one layer's tensors.
Wrong shapes, budgets and positions fail assertions.

Legend: L layers, H_kv KV heads, G query heads per KV head, T prompt tokens, S retained rows per KV head,
D head_dim.
"""
