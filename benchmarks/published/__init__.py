"""Published runs of other frameworks, emulated: how the models are checked against what others measured."""
