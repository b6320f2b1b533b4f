"""Triton kernels, each with its torch reference. Installed, and to be imported, as ``oslo_engine.kernels``.

    layer_norm                layer_norm, add_layer_norm
    rms_norm                  rms_norm, add_rms_norm
    bias_gelu                 bias_gelu                             erf, tanh, quick
    glu                       glu, swiglu, geglu
    cross_entropy             cross_entropy, cross_entropy_parts    the second for a slice of the vocabulary
    rotary                    rotary                                half-split, interleaved, partial
    scale_mask_softmax        scale_mask_softmax                    causal, masks, biases, ALiBi, softcap, sinks
    bias_dropout_residual     bias_dropout_residual                 masks from a counter, never stored
    no_repeat_ngram           no_repeat_ngram

A kernel is a module of that name: formulas, torch reference, and ops of ``torch.ops.oslo_engine`` with shapes for fake tensors
and gradients, so that torch.fx and torch.compile see one node. Its Triton programs are in ``gpu``, under the same name, its
test is ``test_kernel_<name>``. CPU tensors run the reference (with ``TRITON_INTERPRET=1`` the programs, in Triton's
interpreter), GPU tensors the programs; triton is imported at the first use of one. All compute in fp32 and round once. Second
derivatives are an error, but of the linear ones, rotary and no_repeat_ngram. Importing this package imports no kernel.

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
