"""By its presence JAX has CUDA."""
