"""Deals work out over the plans that are in flight in a pipeline of stages."""
