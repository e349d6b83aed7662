"""Sends plans to workers: in this process, or in processes of their own."""
