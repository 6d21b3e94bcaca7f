"""What guards a run against wrong numbers: steps that are not finite or stand out, and replicas that differ."""
