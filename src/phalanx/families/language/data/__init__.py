"""Text for language models: documents -> tokenizer -> token shards -> packed samples -> batches."""
