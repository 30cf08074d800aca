"""What can clients exchange instead of parameters? Methods that send prototypes, embeddings or predictions.

`second_model.py` builds the additional model of FedGKT and PartialFL.
"""
