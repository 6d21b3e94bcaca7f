"""The language family: one decoder that covers GPT-2/3, MPT and Llama 3.

Shapes in names: B samples, S positions, D model width, H query heads, K key/value heads, G query heads a key/value head,
E head width, F MLP width, V vocabulary, N = B*S tokens.
"""
