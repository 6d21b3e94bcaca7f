"""All-gather and reduce-scatter as copies between the devices of one machine, made by copy engines."""
