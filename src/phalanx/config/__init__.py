"""The run file: its schema, how it is read, merged and checked, and the model presets."""
