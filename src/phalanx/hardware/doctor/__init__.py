"""Whether a machine is fit to train on: settings, binding, devices and links, compared between ranks."""
