"""Attention and scoring on torch tensors, an op a file or a folder; each calls `dispatch.path_for`.

`tests/helpers/kvtest/reference/` has the same maths in plain float32, and shares no code with the ops.

What every decode attention means by its arguments, unless it says otherwise: H_kv KV heads, G query heads per
KV head, D head_dim; n rows in use, of cap allocated; m new rows, those of generated tokens.

    queries       `[H_kv, G, D]` of one new token of one sequence and layer, after RoPE
    keys, values  `[H_kv, cap, D]`, the queries' dtype and device; rows at n and beyond are never read. Values
                  of latent rows have fewer channels (MLA), and so has what is returned; in torch only
    new_keys, new_values  `[H_kv, m, D]`, m >= 0, the queries' dtype and device, at any strides
    length        n, 1 to cap
    num_tokens    rows to attend to, at least 1; up to so many rows, all are attended
    scaling       the softmax scale of the exact attention

It returns `[H_kv, G, D]` in the queries' dtype, softmax in float32, and raises ValueError, which names the
argument, its value and what is allowed, if shapes, dtypes or devices do not fit together, a size is out of
range, or a head has nothing to attend to. Where tokens are chosen, they are chosen per KV head, the lowest
index wins ties, and (a deviation from every paper) the newest token is always among them.
"""

from kvferry.kernels import cases as cases  # registers itself
