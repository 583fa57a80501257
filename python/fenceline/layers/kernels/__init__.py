"""The kernels of layers behind one interface: torch's operators as the reference, our own kernels on a GPU."""
