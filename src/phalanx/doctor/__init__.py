"""Whether a machine is fit to train on: environment, binding, devices and links, before the first step."""
