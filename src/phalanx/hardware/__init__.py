"""What devices, links and machines are, as data; measuring them; and whether they are fit to train on."""
