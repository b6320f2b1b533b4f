"""What holds the vocabulary: the embedding, the head, all that is tied to them, and biases added to the logits."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from oslo_engine.plan.names import Names
from oslo_engine.policy.schema import Vocabulary


def find_vocabulary(model: PreTrainedModel) -> Vocabulary:
    """By the model's own getters and the parameters it ties."""
    names = Names(model)
    modules = names.modules
    embedding, head = _of(model.get_input_embeddings), _of(model.get_output_embeddings)
    weights = {id(module._parameters.get("weight")) for module in (embedding, head) if module is not None} - {id(None)}
    holders = {name: module for name, module in modules.items() if id(module._parameters.get("weight")) in weights}
    embeddings = [name for name, module in holders.items() if isinstance(module, nn.Embedding)]
    heads = [name for name, module in holders.items() if isinstance(module, nn.Linear)]
    matrix = head._parameters.get("weight") if head is not None else None
    size = matrix.shape[0] if matrix is not None else 0
    parts = {path.rpartition(".")[0] for path in heads}
    biases = [
        f"{path}.{leaf}".lstrip(".")
        for path, module in modules.items()
        for leaf, parameter in module._parameters.items()
        if parameter is not None
        and tuple(parameter.shape) == (size,)
        and path not in heads
        and (path in parts or any(parameter is modules[name]._parameters.get("bias") for name in heads))
    ]
    return Vocabulary(
        embeddings=tuple(_shortened(names, name) for name in embeddings),
        heads=tuple(_shortened(names, name) for name in heads),
        parameters=tuple(_shortened(names, name) for name in biases),
    )


def _of(getter: object) -> nn.Module | None:
    try:
        found = getter()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Module) else None


def _shortened(names: Names, name: str) -> str:
    return name[len(names.base) :] if names.base and name.startswith(names.base) else name
