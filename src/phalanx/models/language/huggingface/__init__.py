"""Hugging Face checkpoints of the language family: which architectures there are, and how their tensors become ours.

`rules` says how one of our tensors is made of theirs and back; `llama`, `gpt2` and `mpt` are tables of such rules beside
the fields of `config.json`; `read` and `write` handle folders of safetensors. Nothing here needs `transformers`.
"""
