"""Native kernels for CPUs: C++ sources, how they are built, and the ops and schemes that call them."""
