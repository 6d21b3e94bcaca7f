"""Published runs of other frameworks, as the models are checked against."""
