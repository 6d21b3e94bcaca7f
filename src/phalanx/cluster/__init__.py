"""What the devices and machines are, and what this process runs on."""
