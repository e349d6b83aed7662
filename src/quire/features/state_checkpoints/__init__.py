"""Prefix caching of models with recurrent states."""
