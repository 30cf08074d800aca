"""How does every client get a model of its own? Methods of personalised federated learning.

`blocks.py` exchanges blocks of personal models; FedAMP, FedFomo and PFMML use it.
"""
