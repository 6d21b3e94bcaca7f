"""A plan: the best layouts on so many devices, why others are not, how it scales, and what training will take."""
