"""How fast this machine is: single operations, exchanges and whole blocks, timed here, as a profile that planning uses."""
