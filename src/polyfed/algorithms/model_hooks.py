"""`ModelHooks`: the hooks with which a method describes the model that it trains. `Algorithm` extends it."""

from typing import ClassVar

from polyfed.core.tree import Tree
from polyfed.model import Model
from polyfed.model.whole_module import require_embeddings


class ModelHooks:
    """The hooks `check_model`, `private_names` and `mixing`."""

    needs_embeddings: ClassVar[bool] = False
    """Whether the method needs an embedding of each modality. A whole module may not have such embeddings."""

    mixing: ClassVar[str] = "the method can use them together"
    """Why the method mixes modalities whatever the model is, and the option that avoids it. Empty if the training of a
    modality's block reads other modalities only through the error at the model's outputs. The text counts only for the
    class that contains it: a subclass can train in another way. See `privacy/egress/mixing.py`."""

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
