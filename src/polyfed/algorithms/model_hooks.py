"""`ModelHooks`: the hooks with which a method describes the model that it trains. `Algorithm` extends it."""

from typing import ClassVar

from polyfed.core.tree import Tree
from polyfed.model import Model
from polyfed.model.whole_module import require_embeddings


class ModelHooks:
    """The hooks `check_model`, `private_names` and `mixes_modalities`."""

    needs_embeddings: ClassVar[bool] = False
    """Whether the method needs an embedding of each modality. A whole module may not have such embeddings."""

    @property
    def mixes_modalities(self) -> bool:
        """Whether a loss of the method compares representations of several modalities at once.

        The gradient of one modality's block can then depend on the features of another modality, with every fusion.
        """
        return False

    def check_model(self, model: Model) -> None:
        """Raise a RecipeError for a model that the method cannot train, such as one without embeddings."""
        if self.needs_embeddings:
            require_embeddings(model, type(self).__name__)

    def received_template(self, task: str, model: Model) -> Tree:
        """Return the names, shapes and types of the parameters that a task receives. By default, those of the model."""
        return model.template

    def may_lack(self, task: str) -> bool:
        """Return whether a task may receive parameters without blocks that the client has.

        A field with `carries(optional=True)` may lack blocks in every task. By default, a device refuses any other
        message that lacks one.
        """
        return False

    def private_names(self, model: Model) -> frozenset[str]:
        """Return the names of tensors that clients keep. The egress gate refuses a reply that has one of them."""
        return frozenset()
