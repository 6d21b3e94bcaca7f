"""Operations and memory of the parts of a model, read off the modules that run."""
