"""Whether a recipe may run: what its clients send, and the protection that it promises."""
