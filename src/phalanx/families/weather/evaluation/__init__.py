"""Forecasts of trained models, their scores and what they are compared with."""
