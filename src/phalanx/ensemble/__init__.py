"""Several trained models as one: chosen, averaged, and with an uncertainty that is calibrated and checked."""
