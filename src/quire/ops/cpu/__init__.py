"""CPU kernels: C++ sources, their build, their Python bindings, and the ops that call them."""
