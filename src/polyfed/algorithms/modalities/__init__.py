"""How do a model's modalities train in balance? Methods that weigh or mix modalities while the clients average."""
