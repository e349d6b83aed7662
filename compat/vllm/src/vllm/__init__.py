"""The package `vllm`, played by Quire: every name and module comes from one table, `quire.compat.vllm_shim`."""

from quire.compat.vllm_shim import stand_in

stand_in()
