"""Triton kernels, each with its torch reference. Installed, and to be imported, as ``oslo_engine.kernels``.

In a clone this folder lies beside ``oslo_engine/``, so with the repository root on ``sys.path`` it answers to
``import kernels`` as well: the name of a package on PyPI that transformers imports. Under that name this module steps aside.
"""

import sys


def _give_way() -> None:
    """Put the ``kernels`` package found elsewhere on ``sys.path`` in this one's place, or leave an empty module.

    The empty module has no version and no submodules, which transformers takes for "not installed". ModuleNotFoundError would
    be the natural answer, but transformers imports what it has found on the path and does not expect that to fail.
    """
    import os
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    root = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
    spec = PathFinder.find_spec(__name__, [entry for entry in sys.path if os.path.realpath(entry) != root])
    if spec is None or spec.loader is None:
        globals()["__path__"] = []
        return
    module = sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "kernels":
    _give_way()
