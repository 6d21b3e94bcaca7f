"""Training on this machine or a cluster, and what shows that it is fit for that."""
