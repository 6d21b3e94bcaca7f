"""Expert parallelism: each rank of `ep` holds some experts of every mixture, and tokens travel to theirs."""
