"""Architectures, and how a checkpoint fills them. hf and registry know no torch."""
