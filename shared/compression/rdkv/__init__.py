"""RDKV: rate-distortion bit allocation for joint eviction and quantisation of a layer's K and V."""
