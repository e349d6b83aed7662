"""The package `vllm`, provided by Quire: every name and module comes from the table of `quire.compat.vllm_shim`."""

from quire.compat.vllm_shim import stand_in

stand_in()
