"""The package `vllm`, played by Quire: every name and module comes from one table, `quire.compat.as_vllm`."""

from quire.compat.as_vllm import stand_in

stand_in()
