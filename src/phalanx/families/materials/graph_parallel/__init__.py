"""Graph parallelism: ranks hold different atoms of the same structures."""
