"""Measuring: offline throughput beside a peer, and what a step of the scheduler costs."""
