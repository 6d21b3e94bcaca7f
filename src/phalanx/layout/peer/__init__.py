"""Copies between the devices of one machine in place of collectives."""
