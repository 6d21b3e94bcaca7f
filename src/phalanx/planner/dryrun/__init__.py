"""The real step of one rank under fake tensors."""
