"""PyTorch modules on the tensors of a Tree, and layers that work under `vmap`."""
