"""A small sound run file that tests start from."""

RUN = """\
model:
  preset: llama3-8b
  n_layers: 4
data:
  sources: [data/a, {path: data/b, weight: 2}]
  sequence_length: 2048
layout:
  global_batch: 524288 tokens
  microbatch: 2
optimizer:
  lr: 3e-4
training:
  steps: 100
"""
