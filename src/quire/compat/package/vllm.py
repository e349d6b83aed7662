"""The module `vllm` of processes that a program over the shim starts: the shim puts this folder on their PYTHONPATH."""

from quire.compat.vllm_shim import stand_in

stand_in()
